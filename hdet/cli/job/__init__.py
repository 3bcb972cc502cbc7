"""The training job behind `hdet train`: a small GPT on real text, its settings, its processes, and the files that it writes."""
