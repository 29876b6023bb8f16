"""The objects that nodes publish for each other, and the rules by which they are accepted."""
