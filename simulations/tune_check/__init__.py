"""Hold what the tuner predicts and chooses against decodes of prompts that it did not see."""
