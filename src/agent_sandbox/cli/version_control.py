"""Which files make a version control program run others, or lead it to such files. Pure.

A repository's own configuration and hooks are read by whatever program of it comes by: a prompt that shows the branch,
an editor. They are the repository's, so they come into a directory without being seen there as content is. Who may
write them runs programs as the user who stands in it.

* Git: ``.git`` and all of ``_GIT`` in it, in the repositories of its modules and worktrees too; a ``.git`` that is a
  file or link, any link in one; and a directory of any other name that git takes for a repository by what is in it.
* Others: what ``_OTHERS`` names, below a directory of that name anywhere; a link in one, or in its place.

Names are compared as file systems that mind no case do: folded, and without the characters that HFS+ leaves out.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Collection, Iterable

_GIT = {"hooks", "config", "config.worktree", "commondir", "rebase-merge"}
"""The last is a rebase under way, whose list may name programs too."""
_REPOSITORIES = ({"head", "objects", "refs"}, {"head", "commondir"})
"""What git takes a directory for its own by, whatever it is called (gitrepository-layout(5)): all of one of these."""
_NESTED = {"modules", "worktrees", "sl"}
"""What is in ``.git`` and has a configuration of its own, at any depth; Sapling keeps its own in the last."""
_OTHERS = {
    ".hg": ("hgrc", "hgrc-not-shared", "sharedpath"),  # hgrc(5): hooks, extensions; and where another hgrc is
    ".sl": ("config", "hgrc", "hgrc-not-shared", "sharedpath"),
    ".jj": ("repo/config.toml", "repo/workspace-config.toml", "repo/store/git_target"),  # aliases, tools
    ".bzr": ("branch/branch.conf", "branch/location"),
    ".pijul": ("config",),
    "_darcs": ("prefs",),  # posthooks and the test command
    "cvs": ("root", "checkin.prog", "update.prog"),  # a root may name the program to connect with
    ".fslckout": (),  # Fossil's: which database, and that has hooks
    "_fossil_": (),
}
"""Below a directory of that name: the files, or directories with all that is in them; the name itself where none is."""
_POINTERS = {".jj/repo"}
"""Directories that lead elsewhere where they are files."""
MAX_NOTICED = 1_000
"""Names of a copy that are remembered; what has more is looked at in any case."""
_LEFT_OUT = re.compile("[\u200c-\u200f\u202a-\u202e\u2060-\u206f\ufeff]")


def repositories(names: Iterable[str]) -> set[str]:
    """Find the directories among names that git would take for a repository, but for those called ``.git``."""
    marks: dict[str, set[str]] = {}
    wanted = set().union(*_REPOSITORIES)
    for name in names:
        directory, _, last = name.rpartition("/")
        if (folded := _folded(last)) in wanted:
            marks.setdefault(directory, set()).add(folded)
    return {
        directory
        for directory, found in marks.items()
        if any(all_ <= found for all_ in _REPOSITORIES) and ".git" not in _folded(directory).split("/")
    }


def runs_programs(
    parts: list[str], type: int = stat.S_IFREG, known: Collection[str] = (), made: Collection[str] = ()
) -> bool:
    """Tell whether a name is of a configuration or hook by which a repository makes programs run, or leads to one.

    ``type`` is what it is (``S_IFREG`` and so on). ``known`` are git's repositories of other names than ``.git``,
    ``made`` those that the changes make of a directory, which would be one with a configuration that was there before.
    """
    folded = [_folded(part) for part in parts]
    for at in range(len(parts)):
        directory, inside = "/".join(parts[:at]), folded[at:]
        if directory in made and (inside[0] in _GIT or any(inside[0] in marks for marks in _REPOSITORIES)):
            return True
        if directory in known and inside[0] in _GIT:
            return True
        if (inside[0] == ".git" and _of_git(inside, type)) or (inside[0] in _OTHERS and _of_another(inside, type)):
            return True
    return False


class Noticed:
    """What came of a copy that would make version control run programs. ``below`` is where the copy lies."""

    def __init__(self, below: tuple[str, ...] = ()) -> None:
        self.below = below
        self.names: list[str] = []
        self._marks: list[str] = []

    def see(self, parts: tuple[str, ...], type: int) -> None:
        """Take note of one entry of the copy, by its name in it and its type (``S_IFREG`` and so on).

        No ``parts`` stand for a copy that is one file, which then is at ``below``, or for the root of one that is not.
        """
        whole = [*self.below, *parts]
        if not whole or (not parts and type == stat.S_IFDIR):
            return
        name = "/".join(parts or whole[-1:])
        if type != stat.S_IFDIR and runs_programs(whole, type):
            if len(self.names) < MAX_NOTICED:
                self.names.append(name)
        elif len(self._marks) < MAX_NOTICED and _folded(whole[-1]) in {*_GIT, *set().union(*_REPOSITORIES)}:
            self._marks.append(name)

    def told(self) -> list[str]:
        """The first names, and the directories that git takes for a repository by what is in them."""
        return [*self.names, *(directory or "." for directory in sorted(repositories(self._marks)))]


def _of_git(inside: list[str], type: int) -> bool:
    if type == stat.S_IFLNK or (len(inside) == 1 and type != stat.S_IFDIR):
        return True
    return not _GIT.isdisjoint(inside[1:] if inside[1:2] and inside[1] in _NESTED else inside[1:2])


def _of_another(inside: list[str], type: int) -> bool:
    name, below = "/".join(inside), _OTHERS[inside[0]]
    if type == stat.S_IFLNK or not below or (name in _POINTERS and type != stat.S_IFDIR):
        return True
    return any(f"{name}/".startswith(f"{inside[0]}/{one}/") for one in below)


def _folded(name: str) -> str:
    return _LEFT_OUT.sub("", name).casefold()
