"""Our engines under one door (`base.py`). Heavy libraries are imported where used."""
