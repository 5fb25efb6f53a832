#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the pins of a pylock.toml as requirements of pip, with the hashes of the files that can be installed.

usage: requirements_pins.py OLDEST NEWEST pylock.toml MACHINE...

These files are wheels for CPython from 3.OLDEST to 3.NEWEST on Linux with glibc, on the MACHINEs. A package without
such a wheel is built, and has the hash of its source archive. Needs packaging, and Python 3.11 for tomllib.
"""
import sys
import tomllib
import urllib.parse

from packaging.markers import Marker
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename


def applies(marker, minor, machine):
    """Returns True if a package with this marker is installed."""
    environment = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": machine,
                   "implementation_name": "cpython", "platform_python_implementation": "CPython",
                   "python_version": f"3.{minor}"}
    first, last = (Marker(marker).evaluate({**environment, "python_full_version": f"3.{minor}.{patch}"})
                   for patch in (0, 99))
    if first != last:
        sys.exit(f"'{marker}' separates releases of Python 3.{minor}")
    return first


def places(package, oldest, newest, machines):
    """Returns the minor versions and the machines that install the package."""
    marker = package.get("marker", "sys_platform == 'linux'")
    found = {machine: [minor for minor in range(oldest, newest + 1) if applies(marker, minor, machine)]
             for machine in machines}
    machines = [machine for machine in machines if found[machine]]
    minors = found[machines[0]]
    if any(found[machine] != minors for machine in machines) or minors != list(range(minors[0], minors[-1] + 1)):
        sys.exit(f"{package['name']}: cannot write '{marker}' as one range of versions")
    return minors, machines


def condition(minors, oldest, newest):
    parts = []
    if minors[0] > oldest:
        parts.append(f"python_version >= '3.{minors[0]}'")
    if minors[-1] < newest:
        parts.append(f"python_version < '3.{minors[-1] + 1}'")
    return " ; " + " and ".join(parts) if parts else ""


def fits(url, tags):
    name = urllib.parse.unquote(url.rsplit("/", 1)[1])
    return not tags.isdisjoint(parse_wheel_filename(name)[3])


def tags_of(minors, machines):
    """Returns the tags of the wheels that any of these versions and machines can install."""
    found = set()
    for machine in machines:
        glibc = [f"manylinux{version}_{machine}" for version in (1, 2010, 2014, *(f"_2_{i}" for i in range(5, 100)))]
        for minor in minors:
            found |= {*cpython_tags((3, minor), platforms=glibc + [f"linux_{machine}"]),
                      *compatible_tags((3, minor), f"cp3{minor}", glibc + [f"linux_{machine}"])}
    return found


def main(oldest, newest, path, *machines):
    oldest, newest = int(oldest), int(newest)
    with open(path, "rb") as file:
        packages = tomllib.load(file)["packages"]
    for package in packages:
        minors, where = places(package, oldest, newest, machines)
        tags = tags_of(minors, where)
        wheels = [wheel for wheel in package.get("wheels", []) if fits(wheel["url"], tags)]
        pin = f"{package['name']}=={package['version']}{condition(minors, oldest, newest)}"
        if len(where) < len(machines):
            pin += (" and " if " ; " in pin else " ; ") + f"platform_machine == '{where[0]}'"
        hashes = sorted(file["hashes"]["sha256"] for file in wheels or [package["sdist"]])
        print(" \\\n    ".join([pin, *(f"--hash=sha256:{value}" for value in hashes)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
