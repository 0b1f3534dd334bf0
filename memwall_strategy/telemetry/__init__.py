"""What a run tells: metric names, the run folder, the progress, the summary."""
