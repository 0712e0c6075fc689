"""Tensors as Arrow columns that other programs read: fixed-size lists, flat with a shape or nested."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.arrow_numpy import to_numpy
from storage.exchange.batches import TensorRows
from storage.exchange.record import ExportRecord
from storage.manifest import TensorSpec

__all__ = ["nested_type", "read_tensor", "tensor_field_names", "tensor_type", "write_nested", "write_tensor"]


def tensor_field_names(record: ExportRecord) -> dict[str, str]:
    """Tensor column -> its name in a table that also has the key, the blob and the metadata columns."""
    taken = {"key", "blob", "image", *(name.casefold() for name in record.columns)}
    names = {}
    for name in record.tensors:
        field = name
        while field.casefold() in taken:
            field += "_tensor"
        taken.add(field.casefold())
        names[name] = field
    return names


def tensor_type(spec: TensorSpec) -> pa.DataType:
    """Arrow's fixed-shape tensor; a plain number where a row is one."""
    value = pa.from_numpy_dtype(np.dtype(spec.dtype))
    return pa.fixed_shape_tensor(value, spec.shape) if spec.shape else value


def nested_type(spec: TensorSpec) -> pa.DataType:
    """A fixed-size list in a fixed-size list, one for each axis."""
    kind = pa.from_numpy_dtype(np.dtype(spec.dtype))
    for size in reversed(spec.shape):
        kind = pa.list_(kind, size)
    return kind


def write_tensor(rows: TensorRows, spec: TensorSpec) -> pa.Array:
    """Rows as `tensor_type`; null where a row has none."""
    if not spec.shape:
        return _numbers(rows.values, _validity(rows))
    kind = tensor_type(spec)
    return pa.ExtensionArray.from_storage(kind, _listed(_numbers(rows.values), kind.storage_type, rows))


def write_nested(rows: TensorRows, spec: TensorSpec) -> pa.Array:
    """Rows as `nested_type`; null where a row has none."""
    if not spec.shape:
        return _numbers(rows.values, _validity(rows))
    array = _numbers(rows.values)
    kinds = [nested_type(spec)]
    while pa.types.is_fixed_size_list(kinds[-1].value_type):
        kinds.append(kinds[-1].value_type)
    for kind in reversed(kinds[1:]):
        array = pa.Array.from_buffers(kind, len(array) // kind.list_size, [None], children=[array])
    return _listed(array, kinds[0], rows)


def _listed(values: pa.Array, kind: pa.DataType, rows: TensorRows) -> pa.Array:
    return pa.Array.from_buffers(kind, len(rows.present), [_validity(rows)], children=[values])


def _validity(rows: TensorRows) -> pa.Buffer | None:
    return None if rows.present.all() else pa.py_buffer(np.packbits(rows.present, bitorder="little"))


def _numbers(values: np.ndarray, validity: pa.Buffer | None = None) -> pa.Array:
    flat = np.ascontiguousarray(values).reshape(-1)
    data = np.packbits(flat, bitorder="little") if flat.dtype == bool else flat.view(np.uint8)
    return pa.Array.from_buffers(pa.from_numpy_dtype(flat.dtype), len(flat), [validity, pa.py_buffer(data)])


def read_tensor(array: pa.Array, spec: TensorSpec) -> TensorRows:
    """What `write_tensor` or `write_nested` made.

    Raises:
        ValueError: If it is of another type.
    """
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    present = np.array(pc.is_valid(array).to_pylist(), bool)
    flat = array.drop_null()
    while pa.types.is_fixed_size_list(flat.type):
        flat = flat.flatten()
    dtype = np.dtype(spec.dtype)
    if flat.type != pa.from_numpy_dtype(dtype):
        raise ValueError(f"a tensor column has values of type {flat.type}, not {dtype}")
    is_bool = pa.types.is_boolean(flat.type)
    numbers = to_numpy(flat.cast(pa.uint8()), np.uint8).view(bool) if is_bool else to_numpy(flat, dtype)
    values = np.zeros((len(array), *spec.shape), dtype)
    values[present] = numbers.reshape(-1, *spec.shape)
    return TensorRows(values=values, present=present)
