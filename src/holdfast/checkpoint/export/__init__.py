"""Model directories in the format of Hugging Face."""
