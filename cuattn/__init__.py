"""cuattn: GPU attention kernels one can read, measure and change, on a GPU or on the CPU machine."""
from cuattn import compare, devices, kernels, reference, timing
from cuattn.compile import CompileError, CompilerMissing
from cuattn.contract import ContractError
from cuattn.kernels.base import Unsupported
from cuattn.kvcache import OutOfPages, PagedKVCache
from cuattn.machine import Counters, DeviceError, MachineUnavailable, open_machine
from cuattn.ops_attention import attention, attention_varlen, plan_attention, plan_attention_varlen
from cuattn.ops_cache import append_kv, copy_pages, plan_append, plan_copy_pages
from cuattn.ops_cascade import decode_cascade, plan_decode_cascade
from cuattn.ops_decode import decode, decode_mla, plan_decode, plan_decode_mla
from cuattn.ops_merge import merge_states
from cuattn.page_tables import from_flashinfer, to_flashinfer
from cuattn.probing import plan_probe

__all__ = [
    "CompileError", "CompilerMissing", "ContractError", "Counters", "DeviceError", "MachineUnavailable",
    "OutOfPages", "PagedKVCache", "Unsupported", "append_kv", "attention", "attention_varlen", "compare",
    "copy_pages", "decode", "decode_cascade", "decode_mla", "devices", "from_flashinfer", "kernels",
    "merge_states", "open_machine", "plan_append", "plan_attention", "plan_attention_varlen",
    "plan_copy_pages", "plan_decode", "plan_decode_cascade", "plan_decode_mla", "plan_probe", "reference",
    "timing", "to_flashinfer",
]
