"""The sharded dataset: pretokenised samples in large files, read by verified blocks."""
