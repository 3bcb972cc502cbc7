"""An optimizer step by a native kernel, also of replicas on one line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ...profiling import ranged
from .. import native
from ..spec.arguments import check_gradients
from ..spec.interface import PLAIN, RULES, Column, RankOneTensors, StepOptions, StepSettings, StepTensors
from ..spec.settings import SettingsTable, check_options, count_settings
from ..spec.shared import OnLine


class NativeStepPlan:
    """An optimizer step whose tables are read by a native kernel."""

    plan: native._C.StepPlan
    kind = "StepPlan"
    operation = "step"

    def __init__(self, tensors: StepTensors, memory: native.Memory) -> None:
        self.tensors = tensors  # keeps alive what the tables point to
        self.memory = memory
        self.plan = getattr(native._C, self.kind)()
        self.count = len(tensors.params[0])
        self.gradients = native._C.Gradients(Tensor, getattr(Tensor, "__dlpack_c_exchange_api__", None), list(tensors.params[0]))
        self.gradient_types = [native.DTYPES[torch.float32]] * self.count
        self.chunks = self._chunks()
        self.placed_chunks = memory.place(self.chunks)
        self._describe()
        self._point_to_tensors()
        self._make_room()
        self._make_inputs()

    def _chunks(self) -> Tensor:
        t = self.tensors
        masters = None if t.masters is None else t.masters[0]
        packed = native.formats(self.count, None, t.params[0], masters, t.exp_avgs, t.exp_avg_sqs, stochastic=t.stochastic is not None)
        packed = [field | gradient for field, gradient in zip(packed, self.gradient_types, strict=True)]
        return native.chunk_table(t.params[0], t.rows, packed)

    def _describe(self) -> None:
        plan, t = self.plan, self.tensors
        plan.chunks, plan.num_chunks = self.placed_chunks.data_ptr(), native.num_chunks(self.chunks)
        plan.num_tensors, plan.num_replicas, plan.num_rows = self.count, t.num_replicas, 1 + max(t.rows)
        plan.rule = list(RULES).index(t.rule)
        plan.seed, plan.first_replica = (t.stochastic or 0) % 2**64, t.first_replica
        self._note_all_float()

    def _note_all_float(self) -> None:
        t = self.tensors
        plain = native.only_float(*t.params, t.exp_avgs, t.exp_avg_sqs) and native.nothing_in(t.masters)
        self.plan.all_float = int(plain and set(self.gradient_types) <= {native.DTYPES[torch.float32]})

    def _point_to_tensors(self) -> None:
        t, count = self.tensors, self.count
        sets: list[tuple[str, Sequence[Column] | None]] = [
            ("params", t.params),
            ("masters", t.masters),
            ("exp_avgs", None if t.exp_avgs is None else [t.exp_avgs]),
            ("exp_avg_sqs", None if t.exp_avg_sqs is None else [t.exp_avg_sqs]),
            ("counters", [t.steps]),
        ]
        present = [(name, columns) for name, columns in sets if columns is not None]
        self.addresses = self.memory.place(native.address_table(*(column for _, columns in present for column in columns)))
        address = self.addresses.data_ptr()
        for name, columns in present:
            setattr(self.plan, name, address)
            address += 8 * count * len(columns)
        ids = range(count) if t.ids is None else t.ids
        self.numbers = self.memory.place(torch.tensor([*ids, *t.leaders()], dtype=torch.int32))
        self.plan.ids, self.plan.leaders = self.numbers.data_ptr(), self.numbers.data_ptr() + 4 * count

    def _make_room(self) -> None:
        """Memory for what the derive phase writes."""
        plan = self.plan
        rows, replicas = plan.num_rows, plan.num_replicas
        sizes = (native._C.CONTROL_BYTES, rows * native._C.ROW_BYTES, 8 * plan.num_chunks, rows * replicas * native._C.REPLICA_ROW_BYTES)
        self.derived = self.memory.room(sum(sizes))
        # The plan points to the partial sums in a step with a norm.
        plan.control, plan.rows, self.partials_address, plan.replica_rows = accumulate(sizes[:-1], initial=self.derived.data_ptr())
        control = self.derived[: native._C.CONTROL_BYTES].view(torch.float32)
        self.skipped, self.norm = control[0], control[1]

    def _make_inputs(self) -> None:
        """The tables that steps write: addresses of gradients; settings (csrc/core/hyper.h), then addresses of rates."""
        plan = self.plan
        rows, replicas = plan.num_rows, plan.num_replicas
        self.gradient_table = torch.zeros(self.count, dtype=torch.int64)
        self.placed_gradients = self.memory.place(self.gradient_table)
        plan.gradients = self.placed_gradients.data_ptr()
        self.num_settings = count_settings(rows, replicas)
        self.settings_table = torch.zeros(self.num_settings + rows, dtype=torch.float64)
        self.placed_settings = self.memory.place(self.settings_table)
        plan.settings = self.placed_settings.data_ptr()
        plan.rates = plan.settings + 8 * self.num_settings
        self._settings = SettingsTable(self.tensors, self._write_settings)
        self._options: StepOptions | None = None

    def step(self, gradients: Sequence[Tensor], settings: Sequence[StepSettings], options: StepOptions = PLAIN) -> None:
        self._take_gradients(gradients)
        self.upload(settings, options)
        self._run()

    def upload(self, settings: Sequence[StepSettings], options: StepOptions = PLAIN) -> None:
        if options is not self._options:
            check_options(options, self.tensors)
            self._take_options(options)
        self._settings.take(settings, options)

    @ranged("hdet.step")
    def _run(self) -> None:
        self.memory.call(self.operation, self.plan, norm=self._takes_norm)

    def _take_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Writes where the gradients lie and how they are stored, if that has changed. Raises for gradients that cannot be used."""
        changes = self.gradients.read(gradients if isinstance(gradients, list) else list(gradients))
        if changes == 0:
            return
        try:
            self._write_gradients(gradients, changes)
        except BaseException:
            self.gradients.forget()
            raise

    def _write_gradients(self, gradients: Sequence[Tensor], changes: int) -> None:
        types = self.gradients.types
        unusual = changes == native._C.Gradients.UNUSUAL  # not a plain tensor, or a torch without DLPack's exchange: usable, or what is it?
        if not unusual and changes & native._C.Gradients.RETYPED:  # the first ones, mostly: to ask each step would take too long
            unusual = any(map(Tensor.is_neg, gradients))  # DLPack does not tell
        if unusual:
            check_gradients(gradients, self.tensors.params[0])
            native._C.write_addresses(self.gradient_table.data_ptr(), [g.data_ptr() for g in gradients])
            types = [native.DTYPES[g.dtype] for g in gradients]
        else:
            self.gradients.write_addresses(self.gradient_table.data_ptr())
        self.memory.refresh(self.gradient_table, self.placed_gradients)
        if types != self.gradient_types:  # rare: at the first step, if at all
            self.gradient_types = types
            self.chunks.copy_(self._chunks())
            self.memory.refresh(self.chunks, self.placed_chunks)
            self._note_all_float()

    def _write_settings(self, values: list[float], rate_addresses: list[int]) -> None:
        native._C.write_numbers(self.settings_table.data_ptr(), values)
        native._C.write_addresses(self.settings_table.data_ptr() + 8 * self.num_settings, rate_addresses)
        self.memory.refresh(self.settings_table, self.placed_settings)

    def _take_options(self, options: StepOptions) -> None:
        plan = self.plan
        plan.zero_gradients = int(options.zero_gradients)
        self._takes_norm = options.max_norm != 0
        plan.partials = self.partials_address if self._takes_norm else 0
        plan.grad_scale = 0 if options.grad_scale is None else options.grad_scale.data_ptr()
        plan.found_inf = 0 if options.found_inf is None else options.found_inf.data_ptr()
        self._options = options


class NativeRankOnePlan(OnLine, NativeStepPlan):
    """A step of replicas on one line."""

    plan: native._C.RankOnePlan
    kind = "RankOnePlan"
    operation = "rank_one"

    def __init__(self, tensors: RankOneTensors, memory: native.Memory) -> None:
        super().__init__(tensors, memory)
        plan, rows = self.plan, self.plan.num_rows
        self.line_addresses = memory.place(native.address_table(tensors.bases, tensors.displacements))
        plan.bases = self.line_addresses.data_ptr()
        plan.displacements = plan.bases + 8 * plan.num_tensors
        self.scales = memory.place(torch.tensor(tensors.scales or [1.0] * rows, dtype=torch.float64))
        self.lines = memory.room(rows * native._C.REPLICA_ROW_BYTES)
        self.mean_rho = torch.zeros(rows, dtype=torch.float64)
        self.placed_mean_rho = memory.place(self.mean_rho)
        plan.scales, plan.lines, plan.mean_rho = self.scales.data_ptr(), self.lines.data_ptr(), self.placed_mean_rho.data_ptr()

    def _meet(self, rhos: list[float]) -> None:
        self.mean_rho.copy_(torch.tensor(rhos, dtype=torch.float64))
        self.memory.refresh(self.mean_rho, self.placed_mean_rho)
        self.memory.call("converge", self.plan)
