"""A whole network on this machine: bring-up, live view, summary, shutdown."""
