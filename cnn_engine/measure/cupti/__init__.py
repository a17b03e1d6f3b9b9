"""Activity records of the GPU, by CUPTI."""
