"""Words that the synthetic tasks are made of."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    "amber brisk calm dusty eager faded gentle hollow icy jolly keen lively mellow narrow oaken pale quiet rusty "
    "silver tidy upper velvet windy young zesty bold crisp dim early frosty"
)
NOUNS = _words(
    "anchor basket candle drum engine feather garden hammer island jacket kettle ladder mirror needle orchard "
    "pillow quilt river saddle table umbrella valley wagon barrel copper desert ember forest glacier harbor"
)
FIRST_NAMES = _words(
    "Mara Tomas Elin Viktor Nadia Oscar Petra Rufus Selma Tarik Ursula Walter Yara Zoltan Agnes Boris Clara Dario "
    "Edith Felix Greta Hugo Irene Jonas"
)
LAST_NAMES = _words(
    "Velden Okafor Lindqvist Moreau Castell Haruki Novak Pereira Quist Ramsey Santos Tanaka Ulrich Varga Winther "
    "Ximenes Yilmaz Zeller Abbott Brandt Conti Dufour Egan Fabre"
)
CITIES = _words(
    "Lisbon Oslo Lima Cairo Dublin Geneva Havana Jakarta Kyoto London Madrid Naples Paris Quito Rome Sofia Tokyo "
    "Vienna Warsaw Zurich Athens Berlin Chicago Delhi"
)
JOBS = _words(
    "carpenter doctor farmer gardener judge lawyer miner nurse painter pilot poet potter sailor singer soldier "
    "surgeon tailor teacher weaver writer baker butcher dentist driver"
)
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
