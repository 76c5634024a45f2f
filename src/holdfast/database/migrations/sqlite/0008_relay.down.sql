delete from holdfast_schema_version where version = 8;
drop index holdfast_outbox_key;
drop table holdfast_parked;
drop table holdfast_relay;
