"""The heart: match, load, save. The one door that engines and connectors use."""
