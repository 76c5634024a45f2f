"""Tables that workers write under the protection of a lease, so that the checker can compare them with the history.

Statements have ``?`` for parameters; ``with_placeholder`` adapts them to the database driver.
"""

TABLES = (
    "create table proof_write (name text not null, fence bigint not null, key text not null)",
    "create table proof_takeover (name text not null, fence bigint not null, older bigint not null, newest bigint)",
    "create index proof_write_name on proof_write (name, fence)",
    "create table proof_effect (name text not null, value text not null)",
)
EFFECT = "insert into proof_effect (name, value) values (?, ?)"
WRITE = "insert into proof_write (name, fence, key) values (?, ?, ?)"
TAKE_OVER = (
    "insert into proof_takeover (name, fence, older, newest) values (?, ?,"
    " (select count(*) from proof_write where name = ? and fence < ?),"
    " (select max(fence) from proof_takeover where name = ?)) returning older"
)
"""The first statement under a grant: counts the writes of older grants, and stores the newest takeover before it."""


def take_over_parameters(name: str, fence: int) -> tuple[str | int, ...]:
    return name, fence, name, fence, name


def with_placeholder(statement: str, placeholder: str) -> str:
    return statement.replace("?", placeholder)
