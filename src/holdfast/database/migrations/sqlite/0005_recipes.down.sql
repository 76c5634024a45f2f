delete from holdfast_schema_version where version = 5;
drop view holdfast_slot;
alter table holdfast_beat drop column wanted;
