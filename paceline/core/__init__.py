"""The nouns of the system. Standard library only; everybody imports it, it imports nobody."""
