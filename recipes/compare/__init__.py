"""Two or more runs side by side: see ``__main__``."""
