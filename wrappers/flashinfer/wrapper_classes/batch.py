"""The common base of the classes of batches: the plan that run uses, and the buffers of captured graphs."""

from operator import is_
from typing import Any, NamedTuple

import torch

from ...attention.bound import BoundLaunch, bound, memory_of, tensors_of
from ...attention.call import AttentionCall, SequenceBatch, renumbered
from ...attention.op import serve
from ...host import machine
from ...host.checks import check_flag, check_integer, check_operand, check_strided, swapped
from ...host.plain import traced
from ...host.scalars import integer
from .. import values
from ..values import CustomMask, HeadShape, LogitsModifiers, MaskOffsets, TensorTypes

_Tensor, _int32 = torch.Tensor, torch.int32


class BatchPlan(NamedTuple):
    """The result of plan for a batch.

    rows: query tokens. keys: rows that K without pages must have. Both are None if only the device knows them.
    """

    requests: SequenceBatch
    rows: int | None
    keys: int | None
    max_q_len: int | None
    mask: torch.Tensor | None = None
    mask_starts: torch.Tensor | None = None


class PrefillBatch:
    """A batch with a plan.

    Subclasses define the tensors that index it (`_NAMES`; the first `_OFFSETS` of them have B + 1 offsets each, the
    last of these being the keys'), and how many keys a request has.

    Engines read `_causal`, `_window_left`, `_sm_scale` (None: 1 / sqrt(head_dim)) and `_logits_soft_cap` (0.0: off).
    """

    _NAMES: tuple[str, ...]
    _OFFSETS = 2
    _BUFFER = "{}_buf"  # the constructor's name for the buffer of each of them
    _CACHE: str  # run's name for K and V
    _QUERY = "q"  # and for queries
    _PLANNED: dict[str, str] = {}  # names of plan's arguments that differ from those of most classes
    _SCALES: int  # position of run's scale_q, scale_k and scale_v, in the order of upstream's fa3
    run: Any
    forward: Any
    _planned: BatchPlan | None = None
    _planned_options: dict[str, Any]  # fields of `AttentionCall` that plan determines
    _split_kv = "auto"  # likewise
    # The launch of the last run, its other arguments, the tensors among these, and their memory (`memory_of`)
    _bound: tuple[BoundLaunch, tuple[Any, ...], list[torch.Tensor], list[Any]] | None = None
    _shape = HeadShape(0, 1, 1, 1, 0)
    _types: TensorTypes

    def __init__(self, workspace: Any, kv_layout: Any, graph: Any, buffers: tuple[Any, ...], mask: tuple[Any, Any],
                 backend: Any) -> None:  # fmt: skip
        """Check and keep the arguments. mask: the buffers of the mask's bytes and of their offsets."""
        self.device = check_strided("float_workspace_buffer", workspace).device
        values.check_name("kv_layout", kv_layout, ("NHD", "HND"))
        values.check_name("backend", backend, values.BACKENDS)
        check_flag("use_cuda_graph", graph)
        self._kv_layout = kv_layout
        self._buffers: tuple[torch.Tensor, ...] | None = None
        self._most_rows: int | None = None  # query tokens of the first plan, with which graphs were captured
        if graph:
            self._buffers = tuple(map(self._buffer, map(self._BUFFER.format, self._NAMES), buffers))
            batch = self._buffers[0].shape[0] - 1
            self._check_lengths(self._buffers, batch, self._BUFFER)
            bits, starts = mask
            self._mask_buffers = bits, starts
            if bits is not None:
                self._buffer("custom_mask_buf", bits, torch.uint8)
            if starts is not None and self._buffer("qk_indptr_buf", starts).shape[0] != batch + 1:
                raise ValueError(f"qk_indptr_buf: {starts.shape[0]} elements, must be batch_size + 1, {batch + 1}")

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle holds: all but the launch, which each object makes at its first run."""
        return {name: value for name, value in self.__dict__.items() if name != "_bound"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, or an object of another process: a shape_id has another meaning there."""
        self.__dict__.update(state)
        if self._planned is not None:
            self._planned = self._planned._replace(requests=renumbered(self._planned.requests))

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._buffers is not None

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Replace the workspace by float_workspace_buffer, on the same device. Plans stay valid: the old one held
        nothing. int_workspace_buffer is a hint."""
        device = check_strided("float_workspace_buffer", float_workspace_buffer).device
        if device != self.device:
            raise ValueError(f"float_workspace_buffer: device {device}, must be the previous one's, {self.device}")
        if int_workspace_buffer is not None:
            check_strided("int_workspace_buffer", int_workspace_buffer)

    def end_forward(self) -> None:
        """Do nothing; FlashInfer has this method for older callers."""

    def run_return_lse(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Call `run` with return_lse=True; args and kwargs are its other arguments."""
        kwargs["return_lse"] = True
        at = self._SCALES
        if len(args) == at + 3:
            return self.run(*args[:at], q_scale=args[at], k_scale=args[at + 1], v_scale=args[at + 2], **kwargs)
        return self.run(*args, **kwargs)

    def forward_return_lse(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Call `forward` with return_lse=True; args and kwargs are its other arguments."""
        kwargs["return_lse"] = True
        return self.forward(*args, **kwargs)

    def _buffer(self, name: str, value: Any, dtype: torch.dtype = _int32) -> torch.Tensor:
        if not isinstance(value, _Tensor):
            raise ValueError(f"{name}: {type(value).__name__}, must be a tensor if use_cuda_graph is True")
        return check_operand(name, value, 1, (dtype,), self.device, "the workspace's")

    def _check_lengths(self, given: tuple[torch.Tensor, ...], batch: int, named: str = "{}") -> None:
        """Raise unless offsets and lengths belong to one batch. The tensor behind the offsets is the list of pages."""
        for i, (name, t) in enumerate(zip(self._NAMES, given)):
            need = batch + 1 if i < self._OFFSETS else batch
            if t.shape[0] != need and i != self._OFFSETS:
                why = f"a batch of {batch}, from {named.format(self._NAMES[0])}"
                raise ValueError(f"{named.format(name)}: {t.shape[0]} elements, must be {need}: {why}")

    def _check_indices(self, given: tuple[Any, ...]) -> None:
        device = self.device
        for name, t in zip(self._NAMES, given):
            if t.__class__ is not _Tensor or t.dtype is not _int32 or t.dim() != 1 or not t.is_contiguous():
                check_operand(name, t, 1, (_int32,), None)
            if not t.is_cpu and t.device != device:
                raise ValueError(f"{name}: device {t.device}, must be cpu or the workspace's, {device}")
        batch = given[0].shape[0] - 1
        if batch < 0:
            raise ValueError(f"{self._NAMES[0]}: shape (0,), must have at least 1 element")
        self._check_lengths(given, batch)

    def _prepare(self, given: tuple[Any, ...], page_size: int, most: Any, mask: CustomMask | None) -> BatchPlan:
        """Return the plan of a batch, and write the buffers, after all arguments are checked.

        given: the tensors of `_NAMES`, on the host or the device. most: an upper bound of the query lengths; None if
        unknown.
        """
        if self.device.type == "cuda" and machine.current.is_capturing():
            raise RuntimeError(f"{type(self).__name__}: plan cannot be captured: call it before the capture or replay")
        self._check_indices(given)
        batch, rows, keys = given[0].shape[0] - 1, None, None
        if most is not None:
            most = check_integer("max_token_per_sequence", integer(most), 0)
        of_keys, pages = self._OFFSETS - 1, self._OFFSETS
        if given[0].is_cpu and of_keys:
            rows = values.last_of(self._NAMES[0], given[0])
            most = values.longest(given[0]) if most is None else most
        if given[of_keys].is_cpu:
            keys = values.last_of(self._NAMES[of_keys], given[of_keys])
            if page_size:
                if keys > given[pages].shape[0]:
                    need = f"{keys}, the last of {self._NAMES[of_keys]}"
                    raise ValueError(f"{self._NAMES[pages]}: {given[pages].shape[0]} elements, must be at least {need}")
                keys = None
        known: MaskOffsets | None = None  # where the bits begin, if the host knows it
        if mask is not None and all(t.is_cpu for t in given):
            known = values.offsets_of(given[0], self._keys(given, page_size))
            mask.check(int(known.elements[-1]), int(known.bytes[-1]))
        if self._buffers is not None:
            self._check_room(given, rows, mask, known)
        here = values.moved(given, self.device)
        if self._buffers is not None:
            for t, buffer in zip(here, self._buffers):
                if t.data_ptr() != buffer.data_ptr():  # otherwise the caller has written to the buffer itself
                    buffer[: t.shape[0]].copy_(t)
            here = self._buffers
            if self._most_rows is None:
                self._most_rows = rows
        requests = self._requests(here)
        if mask is None:
            return BatchPlan(requests, rows, keys, most)
        if known is None:
            at, size = values.offsets_of(here[0], self._keys(here, page_size)), mask.size(batch)
        else:
            at, size = MaskOffsets(*values.moved(known, self.device)), int(known.bytes[-1])
        if self._buffers is None:
            return BatchPlan(requests, rows, keys, most, mask.pack(at, size), at.bytes.to(_int32))
        bits, starts = self._mask_buffers
        size = min(size, bits.shape[0])
        mask.pack(at, size, bits[:size])
        starts.copy_(at.bytes)
        return BatchPlan(requests, rows, keys, most, bits, starts)

    def _check_room(
        self, given: tuple[torch.Tensor, ...], rows: int | None, mask: CustomMask | None, known: MaskOffsets | None
    ) -> None:
        """Raise unless the buffers, which captured graphs read, have room for a plan."""
        buffers = self._buffers or ()
        fixed, batch = buffers[0].shape[0] - 1, given[0].shape[0] - 1
        if batch != fixed:
            raise ValueError(f"{self._NAMES[0]}: a batch of {batch}, must be that of the buffers, {fixed}")
        for name, t, buffer in zip(self._NAMES, given, buffers):
            if t.shape[0] > buffer.shape[0]:
                room = f"{self._BUFFER.format(name)}, of {buffer.shape[0]}"
                raise ValueError(f"{name}: {t.shape[0]} elements, must fit in {room}")
        most = self._most_rows
        if rows is not None and most is not None and rows > most:
            raise ValueError(f"{self._NAMES[0]}: {rows} query rows, must be at most {most}, those of the first plan")
        if mask is None:
            return
        bits, starts = self._mask_buffers
        if bits is None or starts is None:
            name = "custom_mask_buf" if bits is None else "qk_indptr_buf"
            raise ValueError(f"{name}: None, must be a tensor if use_cuda_graph is True and a mask is planned")
        least = mask.size(0) if known is None else int(known.bytes[-1])
        if bits.shape[0] < least:
            raise ValueError(f"custom_mask_buf: {bits.shape[0]} bytes, must be at least {least}")

    def _keep(self, planned: BatchPlan, shape: HeadShape, types: TensorTypes, modifiers: LogitsModifiers) -> None:
        """Replace the previous plan."""
        self._shape, self._types, self._planned = shape, types, planned
        self._modify(modifiers)

    def _modify(self, m: LogitsModifiers) -> None:
        self._causal, self._window_left, self._logits_soft_cap = m.causal, m.window_left, m.soft_cap
        self._sm_scale = m.sm_scale
        self._scale: float = self._shape.dim_qk**-0.5 if m.sm_scale is None else m.sm_scale
        self._bound = None
        self._planned_options = {
            "causal": m.causal, "window_left": m.window_left, "soft_cap": m.soft_cap, "rope": m.rope,
            "out_dtype": self._types.out, "split_kv": self._split_kv,
            "alibi_slopes": values.alibi_slopes(self._shape.qo, self.device) if m.mode == "ALIBI" else None,
        }  # fmt: skip

    def _override(self, *modifiers: Any) -> None:
        """Replace the modifiers of the plan by those of forward, in the order of `values.modifiers_of`."""
        m = values.modifiers_of(*modifiers)
        self._plan_of_run()
        values.check_rope(m.rope, self._types)
        self._modify(m)

    def _plan_of_run(self) -> BatchPlan:
        if self._planned is None:
            raise RuntimeError(f"{type(self).__name__}: call plan before run")
        return self._planned

    def _ready(self, q: Any, k: Any, v: Any) -> tuple[BatchPlan, SequenceBatch, int]:
        """Return the plan, its requests and an upper bound of the query lengths, after a check of a run's tensors.

        k and v: as in `AttentionCall`.
        """
        planned = self._planned or self._plan_of_run()
        (qo, kv, dim_qk, dim_vo, page_size), (q_dtype, kv_dtype, _) = self._shape, self._types
        requests, rows, keys, most, _, _ = planned
        if traced(q):  # a compiled graph must not contain numbers that vary from plan to plan
            requests, rows, keys, most = requests._replace(shape_id=None), None, None, None
        try:
            tokens, q_heads, dim = q.shape
            _, kv_heads, size, _ = k.shape
            dim_v, dtype = v.shape[3], k.dtype
        except (AttributeError, IndexError, TypeError, ValueError):  # something is not a tensor, or of another rank
            return planned, requests, 0  # it is refused later
        if (dim != dim_qk or q_heads != qo or kv_heads != kv or q.dtype is not q_dtype or dtype is not kv_dtype
                or page_size and size != page_size
                or dim_v != dim_vo and (dtype is not torch.uint8 or 2 * dim_v != dim_vo)
                or rows is not None and rows != tokens or keys is not None and keys > size):  # fmt: skip
            self._refuse(q, k, v)
        return planned, requests, tokens if most is None else most

    def _repeat(
        self, q: Any, kv: tuple[Any, ...], out: Any, lse: Any, others: tuple[Any, ...], rope: Any = None
    ) -> Any:  # fmt: skip
        """Return the result of a run by the launch of the last one, or None if that does not fit.

        kv, rope: as in `BoundLaunch.launch`. others: the other arguments of run, which must be the same objects.
        """
        if self._bound is None:
            return None
        launch, before, tensors, memory = self._bound
        same = all(map(is_, others, before)) and (not tensors or memory_of(tensors) == memory)
        if same and launch.fits(q, kv, out, rope) and launch.takes(kv):
            return launch.launch(q, kv, None, out, lse, rope)
        return None

    def _serve(self, others: tuple[Any, ...], scale: Any, scales: tuple[Any, Any, Any], **fields: Any) -> Any:
        """Return the result of a run, and keep its launch for the runs that repeat it.

        others: as in `_repeat`. scale: the factor on the logits. scales: q_scale, k_scale and v_scale as run got them;
        a number that the host reads of a tensor, or a product, would not follow its values. fields: of `AttentionCall`,
        without those that plan determines.
        """
        scale, scale_tensor, out_scale, out_scale_tensor = values.combine_scales(
            scale, *scales, self.device, self._shape
        )
        call = AttentionCall(
            scale=scale, scale_tensor=scale_tensor, out_scale=out_scale, out_scale_tensor=out_scale_tensor, **fields,
            **self._planned_options,
        )  # fmt: skip
        launch = None if any(isinstance(scale, _Tensor) for scale in scales) else bound(call)
        if launch is None:
            return serve(call)
        tensors = tensors_of(others)
        self._bound = launch, others, tensors, memory_of(tensors)
        return launch.launch(call.q, (call.k, call.v), None, call.out, call.lse, call.q_rope)

    def _refuse(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Raise on the first tensor that does not fit the plan."""
        shape, types, (_, rows, keys, *_) = self._shape, self._types, self._plan_of_run()
        cache = self._CACHE
        for name, found, what, planned, value in (
            ("q", q.dtype, "", "q_data_type", types.q),
            (cache, k.dtype, "", "kv_data_type", types.kv),
            ("q", q.shape[0], "rows", f"last of {self._NAMES[0]}", q.shape[0] if rows is None else rows),
            ("q", q.shape[1], "heads", "num_qo_heads", shape.qo),
            ("q", q.shape[2], "elements per head", "head_dim", shape.dim_qk),
            (cache, k.shape[1], "heads", "num_kv_heads", shape.kv),
            (cache, k.shape[2], "rows per page", "page_size", shape.page_size or k.shape[2]),
            (
                cache,
                v.shape[3] * (2 if types.kv is torch.uint8 else 1),
                "elements per head",
                "head_dim_vo",
                shape.dim_vo,
            ),
        ):
            name, planned = self._QUERY if name == "q" else name, self._PLANNED.get(planned, planned)
            if found != value:
                hint = (
                    swapped(k.shape[2] == shape.kv, k.shape[1], k.shape[2], "kv_layout")
                    if planned == "num_kv_heads"
                    else ""
                )
                shown = f"{name}: {found} ({what})" if what else f"{name}.dtype: {found}"
                raise ValueError(f"{shown}, must be plan's {planned}, {value}{hint}")
        if keys is not None and keys > k.shape[2]:
            raise ValueError(f"k: {k.shape[2]} rows, must be at least the last of plan's {self._NAMES[1]}, {keys}")

    def _keys(self, given: tuple[torch.Tensor, ...], page_size: int) -> torch.Tensor:
        """Return the number of keys of each request, int64 (B,)."""
        raise NotImplementedError

    def _requests(self, here: tuple[torch.Tensor, ...]) -> SequenceBatch:
        """Return the requests of the tensors of `_NAMES` on the device."""
        raise NotImplementedError
