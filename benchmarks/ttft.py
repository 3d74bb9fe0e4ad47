"""Time to first token: cold (prefill), warm (from disk) and hot (third turn of a chat).

For every length and repeat: a fresh slice of text and a question (cold), a second short turn, then some
pairs of two more, one of them with nothing evicted (hot) and one after the agent was evicted, its slots'
content forgotten and everything is to be read from its files (warm; the files are in the page cache). Which
of the two comes first alternates, and both begin when what follows the turn before is done, as after a
pause: its agent's opening read, its memory saved. Lengths are interleaved; medians. Ratios compare with the
reference table, absolute times do not.
"""

from __future__ import annotations

from benchmarks import common
from benchmarks.team import QUESTION, Reader, Team, budget_for, load_embedded

REFERENCE = {  # Gemma 3 12B on an M4 Pro, ms (arXiv 2603.04428)
    1024: (3964, 475, 683),
    2048: (7119, 495, 709),
    4096: (15736, 577, 719),
    8192: (35009, 626, 807),
}
FOLLOW_UP = "Go on."

PAIRS = 3
"""Warm and hot turns for each cold one: every fourth or so seals a group of tokens, which takes a while."""


def turn_of(team: Team, agent: str, kind: str, text: str) -> float:
    """Milliseconds to the first token of a turn of this kind, which it is seen to be."""
    team.settle()
    if kind == "warm":
        team.evict(agent)
    before, blocks = team.loaded_blocks(), team.full_blocks(agent) if kind == "warm" else 0
    turn = team.say(agent, text, max_tokens=16)
    assert turn.reply.result().usage.source == kind, turn.reply.result().usage
    assert team.loaded_blocks() - before == blocks, "a warm turn reads all of its blocks, others none"
    return turn.ttft_ms


def main() -> None:
    args = common.arguments(__doc__ or "", full=True)
    sizes = [1024, 4096] if args.quick else [1024, 2048, 4096, *([8192 - 512] if args.full else [])]
    repeats = 5
    loaded = load_embedded()
    reader = Reader(loaded)
    results: dict[int, dict[str, list[float]]] = {n: {"cold": [], "warm": [], "hot": []} for n in sizes}
    with Team(loaded, budget_for(loaded, agents=3, tokens=max(sizes) + 512)) as team:
        team.say("warm-up", reader.text(128) + QUESTION, max_tokens=8)
        for repeat in range(repeats):
            for size in sizes:
                agent = f"reader/{size}-{repeat}"
                team.settle()
                results[size]["cold"].append(turn_of(team, agent, "cold", reader.text(size - 40) + QUESTION))
                team.say(agent, FOLLOW_UP, max_tokens=16)
                for pair in range(PAIRS):
                    for kind in ("hot", "warm") if (repeat + pair) % 2 == 0 else ("warm", "hot"):
                        results[size][kind].append(turn_of(team, agent, kind, FOLLOW_UP))
                team.evict(agent)
    rows = []
    medians = {n: {kind: common.median(values) for kind, values in r.items()} for n, r in results.items()}
    for size, r in results.items():
        m = medians[size]
        theirs = REFERENCE.get(size) or REFERENCE[8192]
        rows.append(
            [
                f"{size}",
                *(common.spread(r[kind]) for kind in ("cold", "warm", "hot")),
                f"{m['cold'] / m['warm']:.0f}x",
                f"{m['warm'] / m['hot']:.2f}",
                "/".join(map(str, theirs)),
                f"{theirs[0] / theirs[1]:.0f}x",
            ]
        )
    common.table(
        "Time to first token, ms",
        [
            "tokens",
            "cold",
            "warm",
            "hot",
            "cold/warm",
            "warm/hot",
            "paper's cold/warm/hot",
            "paper's ratio",
        ],
        rows,
    )
    summary = {
        "warm_speedup_1k": medians[1024]["cold"] / medians[1024]["warm"],
        "warm_speedup_4k": medians[4096]["cold"] / medians[4096]["warm"],
        "warm_over_hot": max(m["warm"] / m["hot"] for m in medians.values()),
        **{f"{kind}_ms_{size}": m[kind] for size, m in medians.items() for kind in m},
    }
    common.report(args, summary, values=results)


if __name__ == "__main__":
    main()
