"""How many tokens a step yields: who drafts them and which are kept (Chen et al., 2023, and what followed)."""
