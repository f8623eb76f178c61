"""`penstock launch slurm`: the run as a job, and what joins it as an array of jobs.

One job an array task: Slurm gives a task whose node has died another node, and the others do not mind. A job that comes
near its time limit has the run save a checkpoint, and is queued again.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

from penstock.pipeline.config import ConfigError
from penstock.pipeline.launch.parts import Part, head_arguments, member_arguments
from penstock.pipeline.run.command import penstock
from penstock.pipeline.run.folder import is_of_another
from penstock.pipeline.run.resume import STORE

WARNING_S = 180
"""Before the time limit: for the step in hand, and a checkpoint of it."""
ANSWER_S = 60.0

_SCRIPT = """\
#!/bin/bash
# Written by penstock launch slurm. {words}
{directives}

export PENSTOCK_TERM_S=${{PENSTOCK_TERM_S:-120}}  # for the last checkpoint, so that there is time to be queued again
cd {workdir} || exit 2
{at_begin}again= stop=
trap '[ -n "$again$stop" ] || kill -TERM $work; again=yes' USR1  # the time limit is near; twice would be at once
trap '[ -n "$again$stop" ] || kill -INT $work; stop=yes' INT  # somebody ends the run, and waits for its checkpoint
trap 'kill -TERM $work' TERM  # Slurm takes the node, and may give another one
(trap - INT; exec {command}) &  # bash has what is in the background ignore INT
work=$!
while :; do
  wait $work
  code=$?
  kill -0 $work 2>/dev/null || break  # a signal ends a wait, too
done
if {{ [ -n "$again" ] && [ -z "$stop" ] && [ $code -eq 130 ]; }}{later}; then
  # One task's own number may be that of its whole array.
  scontrol requeue "${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}" && exit
fi
{at_end}exit $code
"""
_REGISTER = """\
echo $SLURM_ARRAY_JOB_ID >> {members}  # who is cancelled when the run has failed, or was ended
"""
_LATER = """ ||
  {{ [ $code -eq 75 ] && [ -n "$(squeue --noheader --jobs "$(cat {head})" 2>&1 |
    grep --invert-match "Invalid job id")" ]; }}"""
"""The run of who joins is not there yet, and its own job is in the queue: else nobody would begin it."""
_CANCEL = """\
if [ $code -ne 0 ] && [ $code -ne 75 ] && {{ [ $code -ne 130 ] || [ -n "$stop" ]; }}; then
  xargs --no-run-if-empty scancel < {members}  # whoever would wait for it; 75: another one runs
fi
"""


def scripts(folder: Path, workdir: Path, parts: list[Part], options: list[str]) -> dict[str, str]:
    """A batch script for each part, by its file below ``folder``, which is absolute; ``options`` are sbatch's own, for
    all of them."""
    return {f"slurm/{part.kind}.sh": _script(folder, workdir, part, options) for part in parts}


def write(folder: Path, made: dict[str, str]) -> None:
    """Into the run's folder."""
    for name, text in made.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    members_file(folder).write_text("")


def submit(folder: Path, parts: list[Part], store: str | None = None) -> dict[str, str]:
    """The numbers of the jobs, by what they are. The first is the run: the others begin when it does. ``store``: a
    store's URL with its password, which the run's job has from the environment that Slurm hands on. Raises
    `ConfigError` where Slurm refuses one."""
    jobs: dict[str, str] = {}
    try:
        for part in parts:
            after = [f"--dependency=after:{jobs['head']}"] if jobs else []
            env = {STORE: store} if store and part.kind == "head" else {}
            said = _ask("sbatch", "--parsable", *after, str(folder / f"slurm/{part.kind}.sh"), **env)
            jobs[part.kind] = said.partition(";")[0]
            if part.kind == "head":
                head_file(folder).write_text(jobs["head"])
    except ConfigError:
        if jobs:
            _ask("scancel", *jobs.values())  # a run that nobody would join
        raise
    members_file(folder).write_text("".join(f"{jobs[part.kind]}\n" for part in parts[1:]))
    return jobs


def check_left(folder: Path) -> None:
    """Raises `ConfigError` where the run's own job is in Slurm's queue yet, and so goes on by itself: two would take
    the run, and those that join it, from each other. A copy forgets the job, which is not its own."""
    if is_of_another(folder):
        head_file(folder).unlink(missing_ok=True)
        return
    try:
        job = head_file(folder).read_text().strip()
        state = _ask("squeue", "--noheader", "--format=%T", "--jobs", job)
    except FileNotFoundError:
        return
    except ConfigError as error:
        if "Invalid job id" in str(error):
            return
        raise
    if state == "COMPLETING":
        raise ConfigError(
            f"--resume: job {job} of the run in {folder} is ending (COMPLETING): wait until it has left the queue: "
            f"squeue --jobs {job}"
        )
    if state:
        jobs = " ".join(dict.fromkeys([job, *members_file(folder).read_text().split()]))
        end = f"scancel --batch --signal=INT {job}" if state == "RUNNING" else f"scancel {jobs}"
        raise ConfigError(
            f"--resume: job {job} of the run in {folder} is in the queue yet ({state}), and goes on with it by itself; "
            f"what it waits for: scontrol show job {job}; to go on otherwise end it first: {end}"
        )


def members_file(folder: Path) -> Path:
    """The numbers of the jobs that join, a line each."""
    return folder / "slurm" / "members"


def head_file(folder: Path) -> Path:
    """The number of the run's own job."""
    return folder / "slurm" / "head"


def partitions(options: list[str]) -> list[str]:
    """Those that ``options`` of sbatch's name, the last of which counts; none where they name none."""
    found = re.findall(r"(?:^|\s)(?:--partition[= ]|-p) *(\S+)", "\n".join(options))
    return found[-1].split(",") if found else []


def offers_gpus(wanted: list[str]) -> bool:
    """Whether nodes of the partitions ``wanted`` (none: of the default one) have GPUs, as sinfo says. Raises
    `ConfigError` where there is none of such a name, or no Slurm."""
    rows = [line.split("|") for line in _ask("sinfo", "--noheader", "--format=%P|%G").splitlines()]
    there = {name.rstrip("*") for name, _ in rows}
    if unknown := [name for name in wanted if name not in there]:
        known = ", ".join(sorted(there))
        raise ConfigError(f"--partition: sinfo knows none that is called {unknown[0]!r}; it has {known}")
    found = [gres for name, gres in rows if (name.rstrip("*") in wanted if wanted else name.endswith("*"))]
    return any("gpu" in gres for gres in found)


def job_name(folder: Path, kind: str) -> str:
    """As squeue shows it."""
    return folder.name if kind == "head" else f"{folder.name}-{kind}"


def told(folder: Path, shown: Path, parts: list[Part], jobs: dict[str, str]) -> list[str]:
    """For people, what was submitted and what can be done with it; ``shown`` is the folder as they would type it."""
    lines = [f"job {jobs[part.kind]}, {job_name(folder, part.kind)}: {part.words}" for part in parts]
    lines.append(f"watch:  penstock top {shown}    (once it runs: squeue --me; what it says: {shown}/slurm/)")
    for part in [part for part in parts[1:] if not part.fixed]:
        lines.append(f"more:   sbatch --array={part.tasks}-{2 * part.tasks - 1} {shown}/slurm/{part.kind}.sh")
    lines.append(f"stop:   scancel --batch --signal=INT {jobs['head']}    (saves a checkpoint, and all leave)")
    lines.append(f"drop:   scancel {' '.join(jobs.values())}    (at once, or while it waits in the queue)")
    lines.append(f"go on:  penstock launch slurm --resume {shown}    (once it has left the queue)")
    return lines


def _script(folder: Path, workdir: Path, part: Part, options: list[str]) -> str:
    if set(str(folder)) & set(" %\"'\\"):
        raise ConfigError(f"run.folder: {folder}: sbatch takes no such characters in a path; choose another folder")
    directives = [
        f"--job-name={job_name(folder, part.kind)}",
        f"--output={folder}/slurm/{part.kind}-%{'j' if part.kind == 'head' else 'A_%a'}.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{WARNING_S}",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={part.cpus}",
    ]
    if part.gpus:
        directives.append(f"--gres=gpu:{part.gpus}")
    members = shlex.quote(str(members_file(folder)))
    if part.kind == "head":
        command = shlex.join(penstock(*head_arguments(str(folder))))
        at_begin, at_end, later = "", _CANCEL.format(members=members), ""
    else:
        directives.append(f"--array=0-{part.tasks - 1}")
        *known, _ = penstock(*member_arguments(str(folder), part, ""))
        command = f"{shlex.join(known)} $SLURM_ARRAY_TASK_ID"
        at_begin, at_end = _REGISTER.format(members=members), ""
        later = _LATER.format(head=shlex.quote(str(head_file(folder))))
    return _SCRIPT.format(
        words=part.words,
        directives="\n".join(f"#SBATCH {directive}" for directive in [*directives, *map(_quoted, options)]),
        workdir=shlex.quote(str(workdir)),
        command=command,
        at_begin=at_begin,
        later=later,
        at_end=at_end,
    )


def _quoted(option: str) -> str:
    """As a script's line has it: the quotes around a value have gone with the shell. Several options in one, and what
    is quoted already, stay as they are."""
    name, equals, value = option.partition("=")
    apart = equals and re.search(r"[\s#]", value) and not re.search(r"[\"']|\s-", value)
    return f'{name}="{value}"' if apart else option


def _ask(*command: str, **env: str) -> str:
    """What a command of Slurm's says, with ``env`` beside our environment; the store is not everybody's."""
    ours = {name: value for name, value in os.environ.items() if name != STORE}
    try:
        done = subprocess.run(command, env=ours | env, capture_output=True, text=True, timeout=ANSWER_S)
    except FileNotFoundError:
        raise ConfigError(
            f"{command[0]}: not found: this machine is no part of a Slurm cluster; --dry-run --gpus (or --no-gpus) "
            "prints what would be submitted"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]}: Slurm did not answer within {ANSWER_S:.0f} s; does sinfo answer?") from None
    if done.returncode:
        raise ConfigError(f"{command[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout.strip()
