"""A guessing game of verifiers 0.4, whose Python has packages of its own, as an agent that Holdfast trains.

`agent` runs in Holdfast's environment and starts this file with the other Python. There verifiers owns the loop: its
task gives the reward, its harness asks for turns, and its interception server passes them on to the policy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def agent(row: Mapping[str, Any], base_url: str, api_key: str, python: str) -> float:
    """Play one game by verifiers, and return its reward.

    Args:
        row: Of the data.
        base_url: Of the policy.
        api_key: Of this episode.
        python: That of an environment with verifiers; a relative path begins at this folder.
    """
    folder = Path(__file__).parent
    variables = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
    command = [folder / python, __file__]
    done = subprocess.run(
        command, input=json.dumps(dict(row)), env=variables, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    import asyncio

    import openai
    import verifiers.v1 as vf
    from verifiers.v1.harnesses.null import NullHarnessConfig

    class Secret(vf.TaskData):
        """A letter that the policy has to say."""

        letter: str

    class Guess(vf.Task[Secret]):
        """Rewards early right guesses more."""

        @vf.reward
        async def early(self, trace: vf.Trace) -> float:
            """Return 1 for the first turn, 1/2 for the second, 0 where it was not guessed."""
            is_right = trace.last_reply.startswith(self.data.letter)
            return 1.0 / trace.num_turns if is_right else 0.0

    class Player(vf.Harness[NullHarnessConfig]):
        """Asks for guesses in this process; each goes through verifiers' interception server."""

        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(  # noqa: PLR0913 - of verifiers
            self, ctx: Any, _trace: Any, _runtime: Any, endpoint: str, secret: str, _mcp_urls: Any, data: Any
        ) -> vf.ProgramResult:
            """Play until the letter is guessed, three turns at most."""
            client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
            messages: list[Any] = [{"role": "user", "content": data.prompt}]
            for _ in range(3):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                guess = answer.choices[0].message.content or ""
                if guess.strip().startswith(data.letter):
                    break
                messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": "no"}]
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def play(row: Mapping[str, Any]) -> vf.Trace:
        """Play one game."""
        client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
        config = vf.AgentConfig(
            model="policy", client=client, harness=NullHarnessConfig(id="null"), runtime=vf.SubprocessConfig()
        )
        player = vf.Agent(config)
        player.harness = Player(config.harness)
        return await player.run(Guess(Secret(prompt=row["prompt"][-1]["content"], letter=row["answer"])))

    trace = asyncio.run(play(json.load(sys.stdin)))
    if not trace.ok:
        sys.exit(str(trace.errors))
    print(trace.reward)
