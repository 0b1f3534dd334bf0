"""The commands. Everything here is cheap to import; torch comes in when a run starts."""
