"""Who used what: a line a request, kept and added up. Money is a matter of these numbers; nothing here knows of prompts."""
