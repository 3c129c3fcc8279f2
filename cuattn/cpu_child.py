"""One process of the CPU machine: maps the parent's arena, loads kernels and runs its share of their blocks.

Run by path, with the standard library alone, so that it starts in a few hundredths of a second. A fault in a
kernel ends this process and nothing else. Requests come on stdin: a 4-byte length and JSON. Replies go to
what stdout was: a kind, a 4-byte length and bytes. OK carries the counters, and a trace in JSON if one was
asked for; ERROR and RACE carry a kernel's message; FAULT
is written by the fault handler in `kernels_cu/simt/fault.h` just before the process ends.
"""
import ctypes
import json
import mmap
import os
import signal
import struct
import sys
import threading
import time

OK, ERROR, FAULT, RACE = 0, 1, 2, 3
REPLY = struct.Struct("<BI")
REQUEST = struct.Struct("<I")
COUNTERS = 10
MESSAGE_BYTES = 8192
TRACED_SITES, TRACED_STEPS = 1024, 1 << 16
ORDERS = ("forward", "reverse", "shuffle")


class Extent(ctypes.Structure):
    _fields_ = [("first", ctypes.c_uint64), ("end", ctypes.c_uint64), ("name", ctypes.c_char_p)]


class SiteRow(ctypes.Structure):
    """Mirror of simt::SiteRow in kernels_cu/simt/trace.h."""

    _fields_ = [("file", ctypes.c_char_p), ("line", ctypes.c_int32), ("column", ctypes.c_int32),
                ("access", ctypes.c_int32), ("unused", ctypes.c_int32), ("counts", ctypes.c_uint64 * 8)]


class StepRow(ctypes.Structure):
    """Mirror of simt::StepRow."""

    _fields_ = [("warp", ctypes.c_int32), ("step", ctypes.c_int32), ("ended_by", ctypes.c_int32),
                ("line", ctypes.c_int32), ("file", ctypes.c_char_p), ("counts", ctypes.c_uint64 * 7)]


class Trace(ctypes.Structure):
    """Mirror of simt::Trace."""

    _fields_ = [("sites", ctypes.POINTER(SiteRow)), ("steps", ctypes.POINTER(StepRow)),
                ("site_capacity", ctypes.c_int32), ("step_capacity", ctypes.c_int32),
                ("site_count", ctypes.c_int32), ("step_count", ctypes.c_int32), ("block", ctypes.c_uint64)]

    @classmethod
    def of_block(cls, block):
        sites, steps = (SiteRow * TRACED_SITES)(), (StepRow * TRACED_STEPS)()
        return cls(sites, steps, TRACED_SITES, TRACED_STEPS, 0, 0, block)

    def as_json(self):
        sites = [(s.file.decode(), s.line, s.column, s.access, *s.counts)
                 for s in self.sites[:min(self.site_count, TRACED_SITES)]]
        steps = [(s.warp, s.step, s.ended_by, s.line, s.file.decode(), *s.counts)
                 for s in self.steps[:min(self.step_count, TRACED_STEPS)]]
        return json.dumps({"sites": sites, "steps": steps}).encode()


class Launch(ctypes.Structure):
    """Mirror of simt::Launch in kernels_cu/simt/state.h."""

    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem_bytes", ctypes.c_uint64),
        ("extents", ctypes.POINTER(Extent)),
        ("extent_count", ctypes.c_int32),
        ("order", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("copies_late", ctypes.c_int32),
        ("worker", ctypes.c_int32),
        ("workers", ctypes.c_int32),
        ("fault_fd", ctypes.c_int32),
        ("window", ctypes.c_uint64),
        ("window_bytes", ctypes.c_uint64),
        ("window_to_memory", ctypes.c_int64),
        ("resources", ctypes.c_void_p),
        ("step_limit", ctypes.c_uint64),
        ("argument_bytes", ctypes.POINTER(ctypes.c_uint32)),
        ("argument_count", ctypes.c_int32),
        ("resident", ctypes.c_int32),
        ("races", ctypes.c_int32),
        ("trace", ctypes.c_void_p),
        ("cluster", ctypes.c_int32),
    ]


class Report(ctypes.Structure):
    """Mirror of simt::Report."""

    _fields_ = [("counters", ctypes.c_uint64 * COUNTERS), ("race", ctypes.c_int32),
                ("message", ctypes.c_char * MESSAGE_BYTES)]


def map_memory(address, size, protection, flags, fd):
    """mmap(2) itself, because the mmap module can neither choose an address nor map without access."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    number = ctypes.c_int
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_int64]
    got = libc.mmap(address, size, protection, flags, fd, 0)
    if got in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"cannot map {size} bytes: {os.strerror(ctypes.get_errno())}")
    return got


class Child:
    """The arena's two mappings, the kernels loaded so far, and the pipe back."""

    def __init__(self, fd, size, window, reply_fd):
        self.reply_fd = reply_fd
        self.memory = map_memory(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd)
        reserve = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        got = map_memory(window, size, 0, reserve, -1)
        if got != window:
            raise OSError(f"address {window:#x} is taken")
        self.window, self.size = window, size
        self.entries = {}
        self.resources = (ctypes.c_uint64 * 16)()  # simt::Resources, which the kernels' libraries share

    def entry(self, path, name):
        if (path, name) not in self.entries:
            function = getattr(ctypes.CDLL(path), "simt_launch_" + name)
            pointer = ctypes.POINTER
            function.argtypes = [pointer(Launch), pointer(ctypes.c_void_p), pointer(Report)]
            self.entries[path, name] = function
        return self.entries[path, name]

    def launch(self, request):
        """Runs a launch; returns (kind, payload)."""
        function = self.entry(request["path"], request["entry"])
        arguments = [bytes.fromhex(text) for text in request["args"]]
        buffers = [ctypes.create_string_buffer(data, len(data) + 64) for data in arguments]
        aligned = [self._aligned(buffer) for buffer in buffers]
        pointers = (ctypes.c_void_p * max(len(aligned), 1))(*aligned)
        extents = (Extent * max(len(request["extents"]), 1))(
            *((first, end, name.encode()) for name, first, end in request["extents"])
        )
        launch = Launch(
            request["entry"].encode(), tuple(request["grid"]), tuple(request["block"]), request["smem_bytes"],
            extents, len(request["extents"]), ORDERS.index(request["order"]), request["seed"],
            request["copies_late"], request["worker"], request["workers"], self.reply_fd,
            self.window, self.size, self.memory - self.window,
            ctypes.addressof(self.resources), request["step_limit"],
            (ctypes.c_uint32 * max(len(arguments), 1))(*map(len, arguments)), len(arguments),
            request["resident"], request["races"], None, request["cluster"],
        )
        if request["trace"] is not None:
            trace = Trace.of_block(request["trace"])
            launch.trace = ctypes.addressof(trace)
        report = Report()
        if function(ctypes.byref(launch), pointers, ctypes.byref(report)):
            return RACE if report.race else ERROR, report.message
        counters = struct.pack(f"<{COUNTERS}Q", *report.counters)
        return OK, counters if request["trace"] is None else counters + trace.as_json()

    @staticmethod
    def _aligned(buffer):
        """An address for an argument; by-value structs may ask for 64 bytes."""
        address = ctypes.addressof(buffer)
        to = (address + 63) & ~63
        if to != address:
            ctypes.memmove(to, address, len(buffer) - 64)
        return to


def read_exactly(fd, size):
    """`size` bytes, or None at the end of the pipe."""
    parts = b""
    while len(parts) < size:
        got = os.read(fd, size - len(parts))
        if not got:
            return None
        parts += got
    return parts


def send(fd, kind, payload):
    data = REPLY.pack(kind, len(payload)) + payload
    while data:
        data = data[os.write(fd, data):]


def leave_with_parent(parent):
    """Ends this process soon after its parent, even in the middle of a launch."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def main():
    fd, size, window, parent = (int(text) for text in sys.argv[1:5])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    reply_fd = os.dup(1)
    os.dup2(2, 1)  # a stray print must not enter the replies
    threading.Thread(target=leave_with_parent, args=(parent,), daemon=True).start()
    try:
        child = Child(fd, size, window, reply_fd)
    except OSError as error:
        return send(reply_fd, ERROR, str(error).encode())
    send(reply_fd, OK, b"")
    while (head := read_exactly(0, REQUEST.size)) is not None:
        body = read_exactly(0, REQUEST.unpack(head)[0])
        if body is None:
            return None
        try:
            kind, payload = child.launch(json.loads(body))
        except (OSError, AttributeError) as error:  # the shared object, or its entry, is not there
            kind, payload = ERROR, str(error).encode()
        send(reply_fd, kind, payload)
    return None


if __name__ == "__main__":
    main()
