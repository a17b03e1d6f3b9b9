"""The operators: one file each, with attributes, shape inference, a NumPy float64 reference and costs.

A new operator is its file and one line here.
"""

from .operator import Cost, Operator, Value

__all__ = ["KINDS", "Cost", "Operator", "Value"]

#: Every record by its kind.
KINDS: dict[str, type[Operator]] = {
    record.kind: record
    for record in list(vars().values())
    if isinstance(record, type) and issubclass(record, Operator) and hasattr(record, "kind")
}
