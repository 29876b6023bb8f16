"""Building, copying and checking datasets of either layout."""
