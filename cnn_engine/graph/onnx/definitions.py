"""Operators by the functions that ONNX defines them by, written out as nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...operators.operator import Value
from . import model as protobuf
from .call import Call
from .refusal import Refusal

if TYPE_CHECKING:
    from .importer import Importer


def expand(importer: Importer, call: Call) -> bool:
    """Converts a node by the function that ONNX defines it by; returns whether there is one."""
    onnx = protobuf.package()
    schema = _schema(importer, onnx, call)
    body = None if schema is None else _body(importer, onnx, schema, call)
    if body is None or importer.depth > 4:
        return False
    function = onnx.FunctionProto()
    function.ParseFromString(body)
    scope: dict[str, str] = {}
    for formal, actual in zip(function.input, call.inputs, strict=False):
        scope[formal] = actual or ""
    for formal in list(function.input)[len(call.inputs) :]:
        scope[formal] = ""
    for index, formal in enumerate(function.output):
        scope[formal] = call.output(index)
    defaults = {a.name: a for a in function.attribute_proto}
    for name, attribute in schema.attributes.items():
        if attribute.default_value.type:  # 0 is "undefined"
            defaults.setdefault(name, attribute.default_value)
    given = {**defaults, **{a.name: a for a in call.proto.attribute}}
    nodes = [_with_attributes(onnx, node, given) for node in function.node]
    for node in nodes:
        for name in node.output:
            if name and name not in scope:
                scope[name] = call.temporary()
    importer.depth += 1
    opset, domains = importer.opset, importer.domains
    imports = {entry.domain: entry.version for entry in function.opset_import}
    importer.opset = imports.get("", imports.get("ai.onnx", opset))
    importer.domains = {**domains, **imports}
    known, before = len(importer.problems), (set(importer.values), set(importer.unknown))
    try:
        importer.run(nodes, scope, f"{call.name}/")
    finally:
        importer.depth -= 1
        importer.opset, importer.domains = opset, domains
    if len(importer.problems) > known:
        inside = importer.problems[known:]
        del importer.problems[known:]
        for name in call.outputs:  # the node's own refusal says what becomes of them
            if name not in before[0]:
                importer.values.pop(name, None)
            if name not in before[1]:
                importer.unknown.pop(name, None)
        parts = ", ".join(dict.fromkeys(problem.operator for problem in inside))
        first = inside[0]
        raise Refusal(
            None,
            f"its definition needs {parts}: {first.reason}",
            sorted({name for problem in inside for name in problem.inputs}),
        )
    return True


def has_one(importer: Importer, call: Call) -> bool:
    """Whether ONNX defines the operator by others, which may be unsupported themselves."""
    schema = _schema(importer, protobuf.package(), call)
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)


def _schema(importer: Importer, onnx: Any, call: Call) -> Any:
    """Returns what ONNX says of an operator, or None where it does not know it."""
    own = call.domain == ""
    version = importer.opset if own else importer.domains.get(call.domain, 1)
    try:
        return onnx.defs.get_schema(call.operator, version, call.domain)
    except onnx.defs.SchemaError:
        return None


def _body(importer: Importer, onnx: Any, schema: Any, call: Call) -> bytes | None:
    versions = [v for v in schema.all_function_opset_versions if v <= importer.opset or call.domain]
    try:
        if schema.has_function and versions:
            return schema.get_function_with_opset_version(max(versions))
        if schema.has_context_dependent_function:
            types = [
                b""
                if name is None
                else _type(
                    onnx, importer.values[name], importer.narrow.get(name)
                ).SerializeToString()
                for name in call.inputs
            ]
            return (
                schema.get_context_dependent_function(call.proto.SerializeToString(), types) or None
            )
    except Exception as error:  # what ONNX's own C++ says of attributes that it does not expect
        reason = " ".join(str(error).split())[:200]
        raise Refusal(None, f"the operator's definition cannot be had: {reason}") from None
    return None


def _type(onnx: Any, value: Value, narrow: str | None) -> Any:
    shape = [dim if isinstance(dim, int) else str(dim) for dim in value.shape]
    return onnx.helper.make_tensor_type_proto(protobuf.NUMBERS[narrow or value.dtype], shape)


def _with_attributes(onnx, node, given: Mapping[str, object]):
    """Returns a function's node with the call's attributes in the place of references to them."""
    made = onnx.NodeProto()
    made.CopyFrom(node)
    del made.attribute[:]
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            made.attribute.append(attribute)
            if attribute.HasField("g"):
                body = made.attribute[-1].g
                inner = [_with_attributes(onnx, each, given) for each in attribute.g.node]
                del body.node[:]
                body.node.extend(inner)
        elif attribute.ref_attr_name in given:
            made.attribute.append(given[attribute.ref_attr_name])
            made.attribute[-1].name = attribute.name
    return made
