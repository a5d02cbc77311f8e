"""Why a prompt was computed again: where two prompts part, and what made them. Needs no torch and no model's weights.

read_source ─▶ conversation_of ─▶ side_of (rendered, tokenised, every character placed) ─▶ report_of ─▶ show
"""
