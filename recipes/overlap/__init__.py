"""What communication costs once memwall hides it, beside stock FSDP2 and no communication at all: see ``__main__``."""
