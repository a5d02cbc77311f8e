"""What clients speak. A dialect is a module with `parse`, from a body to an `Ask`, and `shape`, from an answer to its JSON."""
