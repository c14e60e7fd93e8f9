"""The main job: two language models in, one table and two pictures out."""
