"""An optimizer step by a native kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ...rules import RULES, StepSettings
from ...tensors.profiling import ranged
from .. import native
from ..checks import check_gradients, check_options
from ..interface import PLAIN, Column, StepOptions, StepTensors
from ..numbers import codebook
from ..tables import Inputs, SettingsTable, norms_of


class NativeStepPlan:
    """An optimizer step whose tables are read by a native kernel."""

    plan: native._C.StepPlan

    def __init__(self, tensors: StepTensors, memory: native.Memory) -> None:
        self.tensors = tensors  # keeps alive what the tables point to
        self.memory = memory
        self.plan = native._C.StepPlan()
        self.count = len(tensors.params[0])
        self.gradients = native._C.Gradients(
            Tensor, getattr(Tensor, "__dlpack_c_exchange_api__", None), list(tensors.params[0])
        )
        self.gradient_types = [
            native.DTYPES[param.dtype] for param in tensors.params[0]
        ]  # as gradients mostly are
        self._retyped = False  # the chunks' formats have changed, and the device does not know it
        self.chunks = self._chunks()
        self.placed_chunks = memory.place(self.chunks.table)
        self._describe()
        self._point_to_tensors()
        self._make_room()
        self._make_inputs()

    def _chunks(self) -> native.Chunks:
        t = self.tensors
        masters = None if t.masters is None else t.masters[0]
        packed = native.formats(
            self.count,
            None,
            t.params[0],
            masters,
            *t.moments,
            stochastic=t.stochastic is not None,
        )
        packed = [
            field | gradient for field, gradient in zip(packed, self.gradient_types, strict=True)
        ]
        self.plan.known = native._C.known_of(packed)
        return native.chunks_of(t.params[0], packed, self.memory.chunks)

    def _describe(self) -> None:
        plan, t = self.plan, self.tensors
        plan.chunks, plan.num_chunks = self.placed_chunks.data_ptr(), self.chunks.number
        plan.longest = self.chunks.longest
        plan.num_tensors, plan.num_replicas, plan.num_groups = (
            self.count,
            t.num_replicas,
            t.num_groups,
        )
        plan.rule = list(RULES).index(t.rule)
        plan.seed, plan.first_replica = (t.stochastic or 0) % 2**64, t.first_replica
        if t.coded():
            self.codebooks = self.memory.place(codebook())
            plan.codebooks = self.codebooks.data_ptr()

    def _point_to_tensors(self) -> None:
        t, count = self.tensors, self.count
        sets: list[tuple[str, Sequence[Column] | None]] = [
            ("params", t.params),
            ("masters", t.masters),
            ("moments", t.moments),
            ("scales", t.scales),
            ("counters", [t.steps]),
        ]
        present = [(name, columns) for name, columns in sets if columns is not None]
        self.addresses = self.memory.place(
            native.address_table(*(column for _, columns in present for column in columns))
        )
        address = self.addresses.data_ptr()
        for name, columns in present:
            setattr(self.plan, name, address)
            address += 8 * count * len(columns)
        ids = range(count) if t.ids is None else t.ids
        self.numbers = self.memory.place(
            torch.tensor([*ids, *t.groups], dtype=torch.int32, device="cpu")
        )
        self.plan.ids, self.plan.groups = (
            self.numbers.data_ptr(),
            self.numbers.data_ptr() + 4 * count,
        )

    def _make_room(self) -> None:
        """Memory for what the derive phase writes."""
        plan, count = self.plan, self.count
        replica_rows = count * plan.num_replicas * native._C.REPLICA_ROW_BYTES
        sizes = (
            native._C.CONTROL_BYTES,
            count * native._C.ROW_BYTES,
            replica_rows,
            8 * plan.num_chunks,
        )
        self.derived = self.memory.room(sum(sizes))
        # The plan points to the partial sums in a step with a norm.
        plan.control, plan.rows, plan.replica_rows, self.partials_address = accumulate(
            sizes[:-1], initial=self.derived.data_ptr()
        )
        self.partials = self.derived[sum(sizes[:-1]) :].view(torch.float64)
        control = self.derived[: native._C.CONTROL_BYTES].view(torch.float32)
        self.skipped, self.norm, _, self.unscaling = control

    def _make_inputs(self) -> None:
        """What steps write."""
        self.inputs = Inputs(self.memory, self.tensors, self.count)
        self._settings = SettingsTable(self.tensors, self.inputs.write_settings)
        self._options: StepOptions | None = None
        self._point_to_inputs()

    def _point_to_inputs(self) -> None:
        self.plan.gradients, self.plan.settings, self.plan.rates = self.inputs.addresses()

    def step(
        self, gradients: Column, settings: Sequence[StepSettings], options: StepOptions = PLAIN
    ) -> None:
        self._take_gradients(gradients)
        self._take_settings(settings, options)
        carried = self.inputs.to_carry(self.memory.carries)
        if carried is None:
            self._refresh()
            self._run()
        else:
            self._run_with(carried)

    def _run_with(self, carried: Tensor) -> None:
        """A step whose derive phase brings these settings along."""
        plan = self.plan
        plan.carried, plan.num_carried = carried.data_ptr(), len(carried)
        try:
            self._run()
        finally:
            plan.num_carried = 0
        self.inputs.was_carried()

    def gradient_norms(self) -> Tensor:
        owners = self.placed_chunks.view(torch.int32).view(-1, 8)[:, 4]  # Chunk::tensor
        return norms_of(self.partials, owners, self.count, self.unscaling)

    def upload(self, settings: Sequence[StepSettings], options: StepOptions = PLAIN) -> None:
        self._take_settings(settings, options)
        self._refresh()

    def _take_settings(self, settings: Sequence[StepSettings], options: StepOptions) -> None:
        if options is not self._options:
            check_options(options, self.tensors)
            self._take_options(options)
        self._settings.take(settings, options)

    def _refresh(self) -> None:
        if self.inputs.refresh():
            self._point_to_inputs()

    @ranged("hdet.step")
    def _run(self) -> None:
        self.memory.call("step", self.plan, norm=self._takes_norm)

    def _take_gradients(self, gradients: Column) -> None:
        """Writes where the gradients lie and how they are stored, if that has changed.

        Raises for gradients that cannot be used.
        """
        changes = self.gradients.read(gradients if isinstance(gradients, list) else list(gradients))
        if changes == 0:
            return
        try:
            self._write_gradients(gradients, changes)
        except BaseException:
            self.gradients.forget()
            raise

    def _write_gradients(self, gradients: Column, changes: int) -> None:
        unusual = (
            changes == native._C.Gradients.UNUSUAL
        )  # not a plain tensor, or a torch without DLPack's exchange: usable, or what is it?
        retyped = unusual or changes & native._C.Gradients.RETYPED != 0  # the first ones, mostly
        if (
            retyped and not unusual
        ):  # to ask in each step would take too long, and DLPack does not tell
            unusual = any(g is not None and g.is_neg() for g in gradients)
        if unusual:
            check_gradients(gradients, self.tensors.params[0])
            addresses = [
                0 if g is None else g.data_ptr() if g.numel() else native._C.Gradients.EMPTY
                for g in gradients
            ]
            native._C.write_addresses(self.inputs.gradients().data_ptr(), addresses)
        else:
            self.gradients.write_addresses(self.inputs.gradients().data_ptr())
        if not retyped:
            return
        types = (
            [0 if g is None else native.DTYPES[g.dtype] for g in gradients]
            if unusual
            else self.gradients.types
        )
        types = [new or old for new, old in zip(types, self.gradient_types, strict=True)]
        if types != self.gradient_types:  # rare: at the first step, if at all
            self.gradient_types, self._retyped = types, True
            self.chunks.table.copy_(self._chunks().table)
        if self._retyped:  # perhaps by an earlier call, which was refused under capture
            if self.memory.is_captured(
                self.placed_chunks
            ):  # a replay goes on with the gradients that it was captured with
                self.placed_chunks = self.memory.place(self.chunks.table)
                self.plan.chunks = self.placed_chunks.data_ptr()
            else:
                self.memory.refresh(self.chunks.table, self.placed_chunks)
            self._retyped = False

    def _take_options(self, options: StepOptions) -> None:
        plan = self.plan
        plan.zero_gradients = int(options.zero_gradients)
        self._takes_norm = options.max_norm != 0
        plan.partials = self.partials_address if self._takes_norm else 0
        plan.grad_scale = 0 if options.grad_scale is None else options.grad_scale.data_ptr()
        plan.found_inf = 0 if options.found_inf is None else options.found_inf.data_ptr()
        self._options = options
