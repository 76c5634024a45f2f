delete from holdfast_schema_version where version = 9;
drop view holdfast_schedule_now;
drop table holdfast_schedule_slot;
drop table holdfast_schedule;
