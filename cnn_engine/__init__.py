"""A CNN inference engine with hand-written CUDA and CPU kernels, and the laboratory around it."""
