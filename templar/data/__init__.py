"""Text to training sequences: tokenizer, assignment of data to miners, datasets and their readers."""
