import io
import logging

import pytest

import train
from trainer.log import paint, setup_logging, terminal_takes_color


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def package_logger(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    logger = logging.getLogger("trainer")
    level, propagate, handlers = logger.level, logger.propagate, logger.handlers[:]
    logger.handlers = []
    yield logger
    logger.setLevel(level)
    logger.propagate, logger.handlers = propagate, handlers


def test_rank_0_prints_information_with_time_and_level(capsys):
    setup_logging(0, color=False)
    logging.getLogger("trainer.loop").info("hello")
    date, clock, *rest = capsys.readouterr().out.removeprefix("[fullgraph] ").split()
    assert rest == ["INFO", "hello"]
    assert (len(date), len(clock)) == (10, 8)


def test_other_ranks_only_warn_and_give_their_number(capsys):
    setup_logging(3, color=False)
    logging.getLogger("trainer.loop").info("hello")
    logging.getLogger("trainer.loop").warning("disk is slow")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("[fullgraph] [rank 3] ")
    assert line.endswith(" WARNING disk is slow")


def test_setting_up_twice_prints_once_and_takes_the_last_rank(capsys):
    setup_logging(0, color=False)
    setup_logging(2, color=False)
    setup_logging(1, color=False)
    logging.getLogger("trainer").info("hello")
    logging.getLogger("trainer").error("stop")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("[fullgraph] [rank 1] ")


def test_a_handler_on_the_root_logger_does_not_repeat_lines(capsys):
    setup_logging(0, color=False)
    root_lines = io.StringIO()
    handler = logging.StreamHandler(root_lines)
    logging.getLogger().addHandler(handler)
    try:
        logging.getLogger("trainer").info("hello")
    finally:
        logging.getLogger().removeHandler(handler)
    assert capsys.readouterr().out.count("hello") == 1
    assert root_lines.getvalue() == ""


def test_color_needs_a_terminal_and_consent(monkeypatch):
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert not terminal_takes_color()
    monkeypatch.setattr("sys.stdout", Terminal())
    assert terminal_takes_color()
    monkeypatch.setenv("TERM", "dumb")
    assert not terminal_takes_color()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal_takes_color()


@pytest.mark.parametrize(("color", "painted"), [(True, True), (False, False)])
def test_warnings_are_painted_on_a_terminal_only_where_asked(monkeypatch, color, painted):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    setup_logging(0, color=color)
    logging.getLogger("trainer").warning("careful")
    assert ("\033[" in terminal.getvalue()) is painted


def test_paint_ends_its_color():
    assert paint("loss", "green") == "\033[32mloss\033[0m"


@pytest.mark.parametrize("question", ["--help", "--print-config", "--dry-run"])
def test_an_answer_is_printed_by_one_rank_of_a_machine(monkeypatch, capsys, tmp_path, question):
    answers = []
    for local_rank in "01":
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert train.main([question, f"--job.dump_folder={tmp_path}", "--training.global_batch_size=-1"]) == 0
        answers.append(capsys.readouterr().out)
    assert len(answers[0]) > 100
    assert answers[1] == ""
