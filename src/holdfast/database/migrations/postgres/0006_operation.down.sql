delete from holdfast.schema_version where version = 6;
drop function holdfast.policy_apply(jsonb, text, text, bigint), holdfast.policy_list(bigint, int);
drop function holdfast.review_open(text, text, text, text, text, text, text, text, text, boolean),
    holdfast.review_take(text, text, text, text, uuid), holdfast.review_return(bigint, uuid),
    holdfast.review_list(text, bigint, text, int, bigint),
    holdfast.review_decide(bigint, text, text, text), holdfast.operation_kin(text, text, text, text, text, text, text),
    holdfast.operation_failed(text, double precision);
drop function holdfast.operation_entries(text, int, int);
drop function holdfast.operation_match(text, int);
drop function holdfast.operation_list(text, text, text, int, bigint);
drop function holdfast.operation_finish_many(text, text, text, text, text, text, text, text, text, text, text, text, double precision, text, uuid);
drop function holdfast.operation_claim_many(text, text, text, text, text, text, text, text, text, text, text, bigint, text, text, uuid, bigint);
drop function holdfast.operation_correct(text, text, text, int, text, text, int, bigint, text, text, text, text, double precision, boolean, int,
    text, text, uuid,
    text, text, text, text, text, text, text, text, text);
drop function holdfast.operation_write(text, text, text, int, text, text, int, bigint, text, text, text, text, double precision, boolean, int,
    text, text, uuid,
    bigint, text, text, text, text, text, text, text, text, boolean);
drop function holdfast.operation_put(text, text, text, int, text, text, int, bigint, text, text, text, text, double precision, boolean, int,
    text, text, uuid,
    bigint, text, text, text, text, text, text, text, text, boolean, boolean);
drop function holdfast.check_entries(text);
drop function holdfast.operation_end(text);
drop function holdfast.operation_claim(text, text, text, double precision, uuid, uuid, double precision, boolean, bigint, jsonb);
drop function holdfast.operation_acquire(text, text, double precision, uuid, uuid, double precision, boolean, bigint, jsonb);
drop function holdfast.operation_finish(text, text, text, int, text, text, int, bigint, text, text, text, text, double precision, boolean, int,
    text, text, uuid, text, text, text, text, text, text, text, text, boolean, boolean);
drop function holdfast.operation_begin(text, bigint, text);
drop function holdfast.operation_look(text, text, text);
drop function holdfast.operation_get(text);
drop function holdfast.operation_is_of(holdfast.idempotency_log, text, text, text, text, text, text),
    holdfast.operation_count(holdfast.idempotency_log, text, text, int, bigint, int),
    holdfast.says_reset(text);
drop function holdfast.operation_alive(text, bigint);
drop view holdfast.review_now;
drop table holdfast.review;
drop table holdfast.outbox;
drop table holdfast.wal_late;
drop function holdfast.wal_late();
drop view holdfast.wal;
drop table holdfast.wal_more;
drop function holdfast.wal_ready();
drop table holdfast.idempotency_log;
drop function holdfast.policy_check(), holdfast.policy_lets_correct(text, text), holdfast.policy_matches(text, text), holdfast.dataset_form(text), holdfast.dataset_lock(text);
drop table holdfast.policy;
