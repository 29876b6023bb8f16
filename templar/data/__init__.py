"""Text to training sequences: datasets, pages, assignment of data to miners."""
