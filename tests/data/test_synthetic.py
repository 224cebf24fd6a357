"""The embedded data sets are deterministic and have the properties that their descriptions state."""

from __future__ import annotations

import numpy as np

from everyformer.data import synthetic


def test_passages_are_labelled_with_their_play():
    texts, names = synthetic.plays()["train"]
    assert set(names) == set(synthetic.PLAYS)
    play = dict(zip(texts, names, strict=True))
    assert {name for text, name in play.items() if "wherefore art thou Romeo" in text} == {"Romeo and Juliet"}
    assert {name for text, name in play.items() if "My kingdom for a horse" in text.replace("my", "My")} == {
        "Richard III"
    }


def test_generated_data_are_deterministic_and_balanced():
    for make in (synthetic.sets, synthetic.shapes):
        (one, names), (other, _) = make()["train"], make()["train"]
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
        counts = np.unique(names, return_counts=True)[1]
        assert counts.min() > 0.8 * counts.mean()
    assert synthetic.communities() == synthetic.communities()


def test_sets_are_labelled_by_the_centre_with_the_most_points():
    sets, labels = synthetic.sets()["train"]
    nearest = [np.bincount(one.argmax(1), minlength=3).argmax() for one in sets]
    assert np.mean(np.array(nearest) == labels) > 0.85  # noise moves some points nearer to another centre


def test_german_sentences_put_the_verb_second():
    english, german = synthetic.sentences()["train"]
    assert len(set(english)) == 5000
    for one, other in zip(english, german, strict=True):
        verb = next(synthetic.VERBS[word] for word in one.split() if word in synthetic.VERBS)
        assert other.split()[1 if other.startswith(("heute", "oft")) else 2] == verb
        assert ("twenty-two" in one) == ("zweiundzwanzig" in other)
