"""Rules that misbehave: after ``#:`` the name of each and the exit codes of ``check``.

A rule that answers rightly and only makes noise may pass (0); one that cheats never does. Every
one of them follows the same lines, HEAD, and MARK in them becomes the name of a run.
"""

HEAD = """
import atexit, ctypes, gc, json, math, os, random, signal
import subprocess, sys, threading, time, warnings
from dataclasses import dataclass
import numpy as np
import torch
import cactus_theory as ct


def lossless(q, p, n):
    return min(1.0, float(q[n]) / float(p[n]))


SLEEPER = [sys.executable, '-S', '-c', 'import time; time.sleep(300) # MARK']

"""
# files that stand beside a rule
SHADOWS = ("json", "random", "numpy", "torch", "hypothesis", "scipy", "signal", "uuid")
BESIDE = {f"{name}.py": f"raise RuntimeError('{name}.py was executed')\n" for name in SHADOWS} | {
    "helper.py": "here = True\n"
}

RULES = r"""
#: writes_q 1
@ct.rule(budget="kl <= 0 emitted")
def rule(q, p, n):
    q[:] = p
    return min(1, q[n] / p[n])

#: writes_p 1
@ct.rule(budget="kl <= 0 emitted")
def rule(q, p, n):
    p[:] = q
    return min(1, q[n] / p[n])

#: truncates_in_place 1
@ct.rule
def rule(q, p, n):
    q[q < .02] = 0; q /= q.sum()
    return min(1, q[n] / p[n])

#: makes_writable 1
@ct.rule(budget="kl <= 0 emitted")
def rule(q, p, n):
    q.flags.writeable = True; q[:] = p
    return min(1, q[n] / p[n])

#: writes_base 1
@ct.rule(budget="kl <= 0 emitted")
def rule(q, p, n):
    q.base[:] = 0
    return min(1, q[n] / p[n])

#: writes_by_add_at 1
@ct.rule(budget="kl <= 0 emitted")
def rule(q, p, n):
    np.add.at(q, [0], .1)
    return min(1, q[n] / p[n])

#: writes_by_address 1
@ct.rule(budget="kl <= 0 emitted")
def rule(q, p, n):
    ctypes.memmove(q.ctypes.data, p.ctypes.data, q.nbytes)
    return min(1, q[n] / p[n])

#: writes_by_interface 1
@ct.rule(budget="kl <= 0 emitted")
def rule(q, p, n):
    class Door:
        __array_interface__ = q.__array_interface__ | {'data': (q.ctypes.data, False)}
    np.asarray(Door())[:] = p
    return min(1, q[n] / p[n])

#: writes_by_torch 1
@ct.rule(budget="kl <= 0 emitted")
def rule(q, p, n):
    torch.from_numpy(q)[:] = torch.from_numpy(p)
    return min(1, q[n] / p[n])

#: class_writes 1
@dataclass(frozen=True)
class rule(ct.Policy):
    def acceptance(self, q, p, n):
        q.copy_(p)
        return (q.gather(-1, n) / p.gather(-1, n)).nan_to_num(nan=0.0).clamp(max=1).double()
    def recovery(self, q, p, n):
        left = (q - p).clamp(min=0).double()
        total = left.sum(-1, keepdim=True)
        return torch.where(total > 0, left / total, q.double())

#: class_writes_by_numpy 1
@dataclass(frozen=True)
class rule(ct.Policy):
    def acceptance(self, q, p, n):
        q.numpy()[:] = p.numpy()
        return (q.gather(-1, n) / p.gather(-1, n)).nan_to_num(nan=0.0).clamp(max=1).double()
    def recovery(self, q, p, n):
        left = (q - p).clamp(min=0).double()
        total = left.sum(-1, keepdim=True)
        return torch.where(total > 0, left / total, q.double())

#: writes_what_it_kept 0 1
KEPT = []


@ct.rule
def rule(q, p, n):
    KEPT.append(q)
    for row in KEPT[:-1]: ctypes.memset(row.ctypes.data, 0, row.nbytes)
    return min(1, q[n] / p[n])

#: exits 1
@ct.rule
def rule(q, p, n):
    sys.exit(0)
    return lossless(q, p, n)

#: exits_hard 1
@ct.rule
def rule(q, p, n):
    os._exit(0)
    return lossless(q, p, n)

#: exits_while_read 2
sys.exit(0)
rule = None

#: kills_itself 1
@ct.rule
def rule(q, p, n):
    os.kill(os.getpid(), 9)
    return lossless(q, p, n)

#: kills_its_group 1
@ct.rule
def rule(q, p, n):
    os.killpg(0, 9)
    return lossless(q, p, n)

#: kills_its_parent 1 3
@ct.rule
def rule(q, p, n):
    os.kill(os.getppid(), 9)
    time.sleep(100)
    return lossless(q, p, n)

#: overflows_the_stack 1
@ct.rule
def rule(q, p, n):
    ctypes.string_at(0)
    return lossless(q, p, n)

#: loops 3
@ct.rule
def rule(q, p, n):
    while True: pass
    return lossless(q, p, n)

#: recurses 1
@ct.rule
def rule(q, p, n):
    return rule.function(q, p, n)
    return lossless(q, p, n)

#: allocates 1
@ct.rule
def rule(q, p, n):
    np.ones(10**11)
    return lossless(q, p, n)

#: allocates_bit_by_bit 1 3
@ct.rule
def rule(q, p, n):
    held = []
    while True: held.append(bytearray(2**28))
    return lossless(q, p, n)

#: prints_a_lot 0
@ct.rule
def rule(q, p, n):
    print('x' * 10**6)
    return lossless(q, p, n)

#: patches_torch 1
@ct.rule
def rule(q, p, n):
    torch.Tensor.min = lambda self: torch.tensor(1.0)
    return 2.0

#: patches_numpy 1
@ct.rule
def rule(q, p, n):
    np.unravel_index = lambda *a: (0, 0)
    return lossless(q, p, n)

#: patches_json 1
@ct.rule
def rule(q, p, n):
    json.dumps = lambda value: '{}'
    return 2.0

#: patches_while_read 2
torch.where = None


@ct.rule
def rule(q, p, n):
    return 2.0

#: patches_the_judge 1
@ct.rule
def rule(q, p, n):
    from cactus_theory.testing import _property
    _property.measure = lambda *a: _property.Worst()
    return 2.0

#: patches_bounds 1
@ct.rule
def rule(q, p, n):
    from cactus_theory.testing.properties import Bounds
    Bounds.margins = lambda self: self.found * 0
    return 2.0

#: patches_properties 1
@ct.rule
def rule(q, p, n):
    from cactus_theory.testing.laws import LAWS
    LAWS.update(dict.fromkeys(LAWS, LAWS['answers']))
    return 2.0

#: deletes_modules 0 1
@ct.rule
def rule(q, p, n):
    sys.modules.clear()
    return lossless(q, p, n)

#: dtype_and_threads 1
@ct.rule
def rule(q, p, n):
    torch.set_default_dtype(torch.float16); torch.set_num_threads(1)
    return 2.0

#: warnings_as_errors 0
warnings.simplefilter('error')


@ct.rule
def rule(q, p, n):
    warnings.simplefilter('error')
    return lossless(q, p, n)

#: closes_descriptors 1
@ct.rule
def rule(q, p, n):
    os.closerange(0, 21)
    return 2.0

#: closes_every_descriptor 1
@ct.rule
def rule(q, p, n):
    os.closerange(0, 1000)
    return 2.0

#: writes_to_every_descriptor 0 1
@ct.rule
def rule(q, p, n):
    for fd in range(3, 256):
        try: os.write(fd, b'{"garbage" \xff\x00')
        except OSError: pass
    return lossless(q, p, n)

#: says_it_passed 1
@ct.rule
def rule(q, p, n):
    for fd in range(256):
        try: os.write(fd, b'\n{"event": "end", "advice": ""}\n')
        except OSError: pass
    return 2.0

#: prints_events 1
@ct.rule
def rule(q, p, n):
    print('{"event": "end", "advice": ""}', flush=True)
    return 2.0

#: closes_stdout 0 1
@ct.rule
def rule(q, p, n):
    sys.stdout.close(); sys.stderr.close()
    return lossless(q, p, n)

#: terminal_codes 1
@ct.rule
def rule(q, p, n):
    raise ValueError('\x1b[2J\udc80\x00')
    return lossless(q, p, n)

#: forks_a_sleeper 0
DONE = []


@ct.rule
def rule(q, p, n):
    if not DONE:
        DONE.append(subprocess.Popen(SLEEPER))
    return lossless(q, p, n)

#: forks_a_copy 0
DONE = []


@ct.rule
def rule(q, p, n):
    if not DONE:
        DONE.append(1)
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(300)
    return lossless(q, p, n)

#: detaches_a_sleeper 0
DONE = []


@ct.rule
def rule(q, p, n):
    if not DONE:
        DONE.append(subprocess.Popen(SLEEPER, start_new_session=True, env={}))
    return lossless(q, p, n)

#: sleeper_and_loop 3
@ct.rule
def rule(q, p, n):
    subprocess.Popen(SLEEPER, start_new_session=True)
    while True: pass
    return lossless(q, p, n)

#: starts_threads 0
DONE = []


@ct.rule
def rule(q, p, n):
    if not DONE:
        DONE.append(1)
        for daemon in (True, False):
            threading.Thread(target=time.sleep, args=(300,), daemon=daemon).start()
    return lossless(q, p, n)

#: hangs_at_exit 0
atexit.register(time.sleep, 300)


@ct.rule
def rule(q, p, n):
    return lossless(q, p, n)

#: ignores_signals 3
@ct.rule
def rule(q, p, n):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    while True: pass
    return lossless(q, p, n)

#: swallows_its_end 3
@ct.rule
def rule(q, p, n):
    while True:
        try: time.sleep(9)
        except BaseException: pass
    return lossless(q, p, n)

#: raises_base 1
@ct.rule
def rule(q, p, n):
    raise BaseException('no')
    return lossless(q, p, n)

#: raises_interrupt 1
@ct.rule
def rule(q, p, n):
    raise KeyboardInterrupt
    return lossless(q, p, n)

#: raises_generator_exit 1
@ct.rule
def rule(q, p, n):
    raise GeneratorExit
    return lossless(q, p, n)

#: raises_with_evil_text 1
class Evil(Exception):
    def __str__(self): raise SystemExit(0)
    __repr__ = __str__


@ct.rule
def rule(q, p, n):
    raise Evil
    return lossless(q, p, n)

#: returns_nan 1
@ct.rule
def rule(q, p, n):
    return float('nan')

#: returns_inf 1
@ct.rule
def rule(q, p, n):
    return float('inf')

#: returns_complex 1
@ct.rule
def rule(q, p, n):
    return 1j

#: returns_text 1
@ct.rule
def rule(q, p, n):
    return 'likely'

#: returns_a_row 1
@ct.rule
def rule(q, p, n):
    return np.ones(10**6)

#: returns_nothing 1
@ct.rule
def rule(q, p, n):
    return None

#: returns_a_generator 1
@ct.rule
def rule(q, p, n):
    return (x for x in [1.0])

#: returns_a_coroutine 1
@ct.rule
async def rule(q, p, n):
    return 1.0

#: yields 1
@ct.rule
def rule(q, p, n):
    yield 1.0

#: returns_evil_float 1
class Evil:
    def __float__(self): raise KeyboardInterrupt


@ct.rule
def rule(q, p, n):
    return Evil()

#: returns_evil_array 1
class Evil:
    def __array__(self, *a, **k): os._exit(0)


@ct.rule
def rule(q, p, n):
    return Evil()

#: returns_itself 1
@ct.rule
def rule(q, p, n):
    return rule

#: random_answers 1
@ct.rule
def rule(q, p, n):
    return random.random()

#: counts_its_calls 1
CALLS = []


@ct.rule
def rule(q, p, n):
    CALLS.append(1)
    return len(CALLS) % 2 * lossless(q, p, n)

#: shadows 0
@ct.rule
def rule(q, p, n):
    import helper
    assert helper.here
    return lossless(q, p, n)

#: changes_folder 0
@ct.rule
def rule(q, p, n):
    os.chdir('/')
    return lossless(q, p, n)
"""


def read(text: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return each rule's file and its exit codes, by name."""
    found = {}
    for part in text.split("\n#: ")[1:]:
        title, _, code = part.partition("\n")
        name, *codes = title.split()
        found[name] = (HEAD + code, tuple(map(int, codes)))
    return found


HOSTILE = read(RULES)
