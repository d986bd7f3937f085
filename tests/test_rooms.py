"""The same within the layers that have rooms: a room imports its own modules and lower rooms, never one beside it.

A room is a folder of a layer or a module that lies beside the folders.
"""

from __future__ import annotations

import ast

import pytest

from tests.test_layers import SOURCE, imports, parts

ROOMS = {
    "config": """
        base versions yaml12
        sections tree
        merge remedies
        load
        verbs
        path_kinds public
        path_uses
    """,
    "data": """
        tasks
        rows
        content
        tokens
        batches survey
    """,
    "rewards": """
        base
        combine
        processes
        functions
        code
        in_process scorers
        workers
    """,
    "models": """
        accuracy names support
        files layers
        chunks
        scores
        heads
        adapters check
        setup
    """,
    "parallel": """
        collectives context copies failure plan rank_log rendezvous storages
        activations compiler shards
        apply mesh stream
        host_memory
    """,
    "checkpoint": """
        errors
        place
        format
        background loading
        inspect saving
        calls export
        keep
        api session
    """,
    "rollout": """
        sampling
        engine
        episodes local
    """,
    "training": """
        directory observe phases randomness
        run run_state
        watched
        control fingerprints journal profiling stragglers
        rollout_memory pieces
        engines saving step
        evaluate numbers
        fit setup
        other_models
        policy preference
        distillation
    """,
    "cli": """
        arguments edge groups
        commands
        main
        entry
    """,
    "features": """
        cluster forensics plan report rescue trackers trainers vllm
    """,
}
"""From the lowest up; those of one line never import each other."""


def rooms_of(layer: str) -> set[str]:
    """Return folders and modules of a layer; a folder that was renamed may leave byte code behind."""
    return {
        path.relative_to(SOURCE / layer).parts[0].removesuffix(".py") for path in (SOURCE / layer).rglob("*.py")
    } - {"__init__"}


def against_the_rooms(source: str, path: str) -> list[str]:
    """Return a sentence for every import that goes up or aside within a layer."""
    layer, own = parts(path)[:2]
    heights = {room: height for height, line in enumerate(ROOMS[layer].splitlines()) for room in line.split()}
    wrong = []
    for number, module in imports(ast.parse(source), path):
        names = module.split(".")
        other = names[2] if names[:2] == ["holdfast", layer] and len(names) > 2 else own
        if other != own and heights[other] >= heights[own]:
            relation = "beside" if heights[other] == heights[own] else "above"
            wrong.append(f"{path}:{number} may not import {module}: {other} stands {relation} {own}")
    return wrong


@pytest.mark.parametrize("layer", ROOMS)
def test_rooms_import_lower_rooms_alone(layer: str) -> None:
    wrong = [
        sentence
        for file in sorted((SOURCE / layer).rglob("*.py"))
        if file.parent != SOURCE / layer or file.stem != "__init__"
        for sentence in against_the_rooms(file.read_text(encoding="utf-8"), str(file.relative_to(SOURCE)))
    ]

    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("layer", ROOMS)
def test_every_room_has_one_place(layer: str) -> None:
    named = ROOMS[layer].split()

    assert sorted(named) == sorted(rooms_of(layer))


def test_an_arrow_up_is_seen() -> None:
    path = "training/run.py"

    assert against_the_rooms("from holdfast.training.step import train_step", path) == [
        "training/run.py:1 may not import holdfast.training.step: step stands above run"
    ]
