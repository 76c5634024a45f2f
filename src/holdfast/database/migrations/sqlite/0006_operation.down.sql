drop view holdfast_operation;
drop view holdfast_review_now;
drop table holdfast_review;
drop table holdfast_outbox;
drop view holdfast_place;
drop view holdfast_wal;
drop table holdfast_wal_more;
drop table holdfast_idempotency_log;
delete from holdfast_schema_version where version = 6;
