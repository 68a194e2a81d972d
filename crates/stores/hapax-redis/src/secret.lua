-- Whether whoever opens a store here names keys by the same secret as everybody else. That one has
-- a name of its own, a hash that does not tell it, and the first to come leaves it.
--
-- KEYS[1]  the name
-- ARGV[1]  what it is to be
-- ARGV[2]  1 to leave it where there is none: then the answer is 2
local name = redis.pcall('GET', KEYS[1])
if type(name) == 'table' then
  return redis.error_reply('HAPAX ' .. name.err)
end
if name then
  return name == ARGV[1] and 1 or 0
end
if ARGV[2] ~= '1' then
  return 1
end
local done = redis.pcall('SET', KEYS[1], ARGV[1])
if done.err then
  return redis.error_reply('NOTWRITTEN ' .. done.err)
end
return 2
