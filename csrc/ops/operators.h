// All contracts of operators. Include it before operators.def is included inside a struct or a
// function.
#pragma once

#include "ops/operators.def"
