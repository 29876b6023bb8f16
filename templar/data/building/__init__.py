"""Datasets from files on the disk: sources, parts, and the assembled folder of either layout."""
