"""Usage lines, the values that they say, and families of flags."""

from megatron.config.spellings.usage import Values, flags_of, look_up, take_values


def test_each_flag_of_a_usage_line_has_its_values() -> None:
    assert dict(flags_of("--profile --seed N --names N... --rl-*")) == {
        "--profile": Values.NONE,
        "--seed": Values.ONE,
        "--names": Values.MANY,
        "--rl-*": Values.NONE,
    }


def test_values_end_before_the_next_flag() -> None:
    for values, taken in ((Values.NONE, 0), (Values.ONE, 1), (Values.MANY, 2)):
        rest = ["a", "-1", "--seed", "b"]
        assert take_values(values, rest) == ["a", "-1"][:taken]
        assert rest == ["a", "-1", "--seed", "b"][taken:]
    assert take_values(Values.ONE, ["--seed"]) == take_values(Values.MANY, []) == []


def test_a_flag_is_looked_up_by_its_name_before_the_longest_of_its_families() -> None:
    table = {"--rl-top": 1, "--rl-*": 2, "--rl-to*": 3}
    assert [look_up(table, word) for word in ("--rl-top", "--rl-tops", "--rl-k", "--r")] == [
        1,
        3,
        2,
        None,
    ]
