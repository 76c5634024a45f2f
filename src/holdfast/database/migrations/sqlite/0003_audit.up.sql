-- What operators do to others' work: who, why, what, and the outcome. A call that acts on others' work writes its entry itself, in the same
-- transaction. A file has no roles: who may write it can also change the audit.
create table holdfast_audit (
    id       integer primary key,
    at       real not null,
    actor    text not null,
    action   text not null,
    subject  text not null,
    reason   text not null,
    fence    integer,
    detail   text,
    outcome  text,
    ended_at real
);

insert into holdfast_schema_version (version, name) values (3, 'audit');
