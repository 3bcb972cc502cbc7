"""Controllers that users construct, and what they measure."""
