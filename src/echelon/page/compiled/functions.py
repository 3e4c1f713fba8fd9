# SPDX-License-Identifier: Apache-2.0
"""Functions and methods of Python and of NumPy, by what they are in the page's runtime."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Mapping
from math import gcd, lcm, log2, prod
from typing import Any

import numpy as np

FUNCTIONS: Mapping[Any, str] = {
    abs: "Math.abs",
    Counter: "$rt.counter",
    deque: "$rt.list",
    divmod: "$rt.divmod",
    dict: "$rt.dict",
    enumerate: "$rt.enumerate",
    float: "$rt.float",
    frozenset: "$rt.set",
    gcd: "$rt.gcd",
    int: "$rt.int",
    iter: "$rt.iterator",
    json.dumps: "$rt.dumps",
    lcm: "$rt.lcm",
    len: "$rt.len",
    list: "$rt.list",
    log2: "Math.log2",
    max: "$rt.largest",
    min: "$rt.least",
    prod: "$rt.prod",
    range: "$rt.range",
    reversed: "$rt.reversed",
    round: "$rt.round",
    set: "$rt.set",
    str: "$rt.str",
    sum: "$rt.sum",
    tuple: "$rt.list",
    zip: "$rt.zip",
    any: "$rt.any",
    all: "$rt.all",
    np.abs: "Math.abs",
    np.ceil: "Math.ceil",
    np.clip: "$rt.clip",
    np.floor: "Math.floor",
    np.isin: "$rt.isin",
    np.log: "Math.log",
    np.log2: "Math.log2",
    np.maximum: "$rt.max",
    np.minimum: "$rt.min",
    np.sqrt: "Math.sqrt",
    np.where: "$rt.where",
}
"""Functions by what they are in the page."""
IGNORED_NAMES: Mapping[Any, frozenset[str]] = {
    np.asarray: frozenset({"dtype"}),
    zip: frozenset({"strict"}),
}
"""Arguments by name that change nothing there."""
METHODS: Mapping[str, str] = {
    "items": "items",
    "values": "values",
    "keys": "keys",
    "get": "get",
    "pop": "pop",
    "append": "append",
    "index": "index",
    "count": "count",
    "startswith": "startswith",
    "endswith": "endswith",
    "join": "joined",
    "add": "include",
    "setdefault": "setdefault",
    "extend": "extend",
    "insert": "insert",
    "remove": "remove",
    "popleft": "popleft",
    "upper": "upper",
    "isupper": "isupper",
    "ljust": "ljust",
}
"""Methods of Python's own types."""
