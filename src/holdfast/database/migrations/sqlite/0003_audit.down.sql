delete from holdfast_schema_version where version = 3;
drop table holdfast_audit;
