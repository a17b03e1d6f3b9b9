// The shape of the convolutions' launches: num_gangs, num_workers and vector_length, where the
// build names them (CNN_ENGINE_OPENACC_SHAPE=gangs:workers:vector, 0 for what the compiler and its
// runtime choose). The default names none, as plain directives do.
#pragma once

#ifndef CNN_ENGINE_ACC_SHAPE
#define CNN_ENGINE_ACC_SHAPE
#endif
