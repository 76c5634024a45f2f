"""What is written under the protection of a lease, so that the database can tell its own side: in chaos, in scenes.

Statements have ``?`` for their parameters; ``in_style`` gives them the driver's.
"""

TABLES = (
    "create table proof_write (name text not null, fence bigint not null, key text not null)",
    "create table proof_takeover (name text not null, fence bigint not null, older bigint not null, newest bigint)",
    "create index proof_write_name on proof_write (name, fence)",
    "create table proof_effect (name text not null, value text not null)",
)
WRITE = "insert into proof_write (name, fence, key) values (?, ?, ?)"
TAKE_OVER = (
    "insert into proof_takeover (name, fence, older, newest) values (?, ?,"
    " (select count(*) from proof_write where name = ? and fence < ?),"
    " (select max(fence) from proof_takeover where name = ?)) returning older"
)
"""The first thing under a grant: how many writes of older grants there are, and the newest one that was here before."""


def take_over(name: str, fence: int) -> tuple[str | int, ...]:
    """The parameters of TAKE_OVER."""
    return name, fence, name, fence, name


def in_style(statement: str, placeholder: str) -> str:
    return statement.replace("?", placeholder)
